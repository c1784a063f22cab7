#include "bindings.h"

NB_MODULE(_native, module) {
  module.doc() = "Native parts of offload: completion queue, update kernels, storage I/O.";
  bind_runtime(module);
  bind_kernels(module);
  bind_io(module);
}
