#include "dispatch.h"

namespace offload {

std::vector<const KernelSet*> supported_kernels() {
  std::vector<const KernelSet*> sets = {&kScalarKernels};
#if defined(OFFLOAD_X86_KERNELS)
  // The builtin also asks the operating system (XGETBV) whether it saves the wide registers.
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c")) sets.push_back(&kAvx2Kernels);
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl"))
    sets.push_back(&kAvx512Kernels);
#endif
  return sets;
}

}  // namespace offload
