#include "bindings.h"

void bind_kernels(nanobind::module_&) {}
