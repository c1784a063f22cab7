#include "bindings.h"

void bind_io(nanobind::module_&) {}
