// Autocast with the lists of operators that CUDA has.
#include <ATen/autocast_mode.h>
#include <torch/library.h>

namespace at::autocast {
namespace {

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
#define LATE_LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define LATE_FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define LATE_FP32_SET(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define LATE_PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  AT_FORALL_LOWER_PRECISION_FP(LATE_LOWER)
  AT_FORALL_FP32(LATE_FP32)
  AT_FORALL_FP32_SET_OPT_DTYPE(LATE_FP32_SET)
  AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(KERNEL_DIFFERENT_REDISPATCH_SIGNATURE_PRIVATEUSEONE)
  AT_FORALL_PROMOTE(LATE_PROMOTE)
}

}  // namespace
}  // namespace at::autocast
