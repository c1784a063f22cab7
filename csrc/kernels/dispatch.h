// Which instruction sets this CPU runs, and the functions for each.
#pragma once

#include <vector>

#include "kernels.h"

namespace offload {

// Fastest last; "scalar" is always there. Reads cpuid, so it is for construction, not for loops.
std::vector<const KernelSet*> supported_kernels();

}  // namespace offload
