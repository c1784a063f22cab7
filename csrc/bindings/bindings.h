// Each file in this folder binds one part of csrc/; only this folder knows Python.
#pragma once

#include <nanobind/nanobind.h>

void bind_runtime(nanobind::module_& module);
void bind_kernels(nanobind::module_& module);
void bind_io(nanobind::module_& module);
