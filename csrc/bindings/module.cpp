#include "bindings.h"

NB_MODULE(_native, module) {
  module.doc() = "Native parts of offload: completion queue, update kernels, storage I/O.";
  // A process that ends with a session still open is not a leak worth a page of warnings.
  nanobind::set_leak_warnings(false);
  bind_runtime(module);
  bind_kernels(module);
  bind_io(module);
}
