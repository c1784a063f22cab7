// `tensor.data = other` between host and device, as with CUDA: torch allows it between the backends that it lists, to
// which PrivateUse1 does not belong. `torch.nn.Module.to` asks the same, and keeps its parameters where it may.
#include <ATen/core/VariableHooksInterface.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/library.h>

namespace late {
namespace {

using at::TensorBase;

bool is_plain(const TensorBase& tensor) {
  return tensor.layout() == c10::kStrided && (tensor.is_cpu() || tensor.is_privateuseone());
}

bool may_become(const at::Tensor& tensor, const at::Tensor& other) {
  return (is_plain(tensor) && is_plain(other)) ||
         tensor.unsafeGetTensorImpl()->has_compatible_shallow_copy_type(other.key_set());
}

// What torch does, but for its refusal.
void set_data(const TensorBase& tensor, const TensorBase& data) {
  TORCH_CHECK(!tensor.requires_grad() || torch::autograd::isDifferentiableType(data.scalar_type()),
              "data set to a tensor that requires gradients must be floating point or complex dtype");
  if (auto* meta = torch::autograd::impl::get_autograd_meta(tensor)) {
    const std::lock_guard<std::mutex> held(meta->mutex_);
    if (meta->grad_accumulator_.lock()) {
      meta->grad_accumulator_.reset();  // it is of the other device
    }
  }
  tensor.unsafeGetTensorImpl()->shallow_copy_from(data.getIntrusivePtr());
}

struct Hooks final : at::impl::VariableHooksInterface {
  at::impl::VariableHooksInterface* const torchs = at::impl::GetVariableHooks();

  void set_data(const TensorBase& tensor, const TensorBase& data) const override {
    if (is_plain(tensor) && is_plain(data) && tensor.device().type() != data.device().type()) {
      late::set_data(tensor, data);
    } else {
      torchs->set_data(tensor, data);
    }
  }

  TensorBase tensor_data(const TensorBase& t) const override { return torchs->tensor_data(t); }
  TensorBase variable_data(const TensorBase& t) const override { return torchs->variable_data(t); }
  const c10::intrusive_ptr<torch::autograd::Node>& grad_fn(const TensorBase& t) const override {
    return torchs->grad_fn(t);
  }
  unsigned _register_hook(const TensorBase& t, std::function<TensorBase(const TensorBase&)> hook) const override {
    return torchs->_register_hook(t, std::move(hook));
  }
  void remove_hook(const TensorBase& t, unsigned position) const override { torchs->remove_hook(t, position); }
  bool is_view(const TensorBase& t) const override { return torchs->is_view(t); }
  const TensorBase& base(const TensorBase& t) const override { return torchs->base(t); }
  const std::string& name(const TensorBase& t) const override { return torchs->name(t); }
  bool is_leaf(const TensorBase& t) const override { return torchs->is_leaf(t); }
  std::int64_t output_nr(const TensorBase& t) const override { return torchs->output_nr(t); }
  TensorBase data(const TensorBase& t) const override { return torchs->data(t); }
  std::int64_t _version(const TensorBase& t) const override { return torchs->_version(t); }
  void retain_grad(const TensorBase& t) const override { torchs->retain_grad(t); }
  bool retains_grad(const TensorBase& t) const override { return torchs->retains_grad(t); }
  void _backward(const at::Tensor& t, at::TensorList inputs, const std::optional<at::Tensor>& gradient,
                 std::optional<bool> keeps_graph, bool makes_graph) const override {
    torchs->_backward(t, inputs, gradient, keeps_graph, makes_graph);
  }
  void requires_grad_(const TensorBase& t, bool requires_grad) const override {
    torchs->requires_grad_(t, requires_grad);
  }
  void basic_autograd_not_implemented_fallback(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                                               torch::jit::Stack* stack) const override {
    torchs->basic_autograd_not_implemented_fallback(op, keys, stack);
  }
  std::optional<c10::ScalarType> grad_dtype(const TensorBase& t) const override { return torchs->grad_dtype(t); }
  void set_grad_dtype(const TensorBase& t, const std::optional<c10::ScalarType>& dtype) const override {
    torchs->set_grad_dtype(t, dtype);
  }
};

const at::impl::VariableHooksRegisterer registered(new Hooks);

TORCH_LIBRARY_IMPL(aten, CPU, m) { m.impl("_has_compatible_shallow_copy_type", may_become); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) { m.impl("_has_compatible_shallow_copy_type", may_become); }

}  // namespace
}  // namespace late
