// One element at a time, at the base architecture: the oracle for the other units, and all there is on
// CPUs that have none of them. On x86-64 it is compiled without vectorisation so that it stays an oracle.
#include "kernels.h"

namespace offload {
namespace {
struct Single;
using Simd = Single;
}  // namespace
}  // namespace offload

#include "body.h"

namespace offload {
const KernelSet kScalarKernels = {"scalar", update, gradient_blocks, fingerprint, add, decode, encode, stream};

FormatFacts format_facts(const Segment& segment) { return facts_of_format(segment); }
FormFacts form_facts(std::int32_t form) { return facts_of_form(form); }
}  // namespace offload
