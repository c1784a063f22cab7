// A tensor's place and form, as tasks use them.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/InferenceMode.h>

#include <vector>

namespace late {

// Does not keep the tensor's memory, as no kernel does that has been launched: what is dropped too early is reused.
class View {
 public:
  // Throws where the tensor's pointer is not of its device, or its storage is too small.
  explicit View(const at::Tensor& tensor);
  // A host tensor over the memory that tasks use. Made under `Plain`; read and written by tasks alone.
  at::Tensor tensor() const;

 private:
  void* address_;  // null where there are no elements
  std::vector<std::int64_t> sizes_, strides_;
  c10::ScalarType dtype_;
  bool is_negative_, is_conjugate_;
};

// What operators run under in tasks: no autograd, whatever the caller has set.
struct Plain {
  c10::InferenceMode inference{false};
  at::AutoDispatchBelowADInplaceOrView below;
};

}  // namespace late
