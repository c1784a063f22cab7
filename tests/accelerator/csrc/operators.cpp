// Operators of the device "late": every one of the CPU's, later.
//
// At the call, an operator's Meta kernel tells the form of its results, which are allocated; the CPU's kernel runs as
// a task on the current stream. Where no Meta kernel tells (nonzero, item), the caller waits for the stream.
//
// Invariants: device memory is read and written by tasks alone; a task keeps host tensors as they were at the call and
// keeps no device tensor; an operator runs on its tensors' device, whichever is current.
// Not done here: operators on a CPU tensor that is changed, and views other than those at the end of this file.
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/ComplexHelper.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <map>
#include <mutex>
#include <set>

#include "memory.h"
#include "operators.h"
#include "random.h"
#include "streams.h"
#include "view.h"

namespace late {

// -- View

View::View(const at::Tensor& tensor)
    : address_(nullptr),
      sizes_(tensor.sizes().vec()),
      strides_(tensor.strides().vec()),
      dtype_(tensor.scalar_type()),
      is_negative_(tensor.is_neg()),
      is_conjugate_(tensor.is_conj()) {
  if (tensor.numel() == 0) return;
  const auto& storage = tensor.unsafeGetTensorImpl()->unsafe_storage();
  const auto itemsize = tensor.element_size();
  const auto offset = std::size_t(tensor.storage_offset());
  const auto needed = at::detail::computeStorageNbytes(sizes_, strides_, itemsize, offset);
  TORCH_CHECK(needed <= storage.nbytes(), "late: a tensor of ", needed, " bytes in a storage of ", storage.nbytes());
  const void* base = storage.data();
  if (tensor.device().type() == kLate) {
    const auto device = device_of(base);
    TORCH_CHECK(device && *device == tensor.device().index(), "late: a tensor's memory is not of ", tensor.device());
  }
  address_ = static_cast<char*>(real(base)) + offset * itemsize;
}

at::Tensor View::tensor() const {
  const auto options = at::TensorOptions().dtype(dtype_).device(at::kCPU);
  auto made =
      address_ ? at::from_blob(address_, sizes_, strides_, options) : at::empty_strided(sizes_, strides_, options);
  if (is_negative_) made._set_neg(true);
  if (is_conjugate_) made._set_conj(true);
  return made;
}

namespace {

using Stack = torch::jit::Stack;
using Tensors = std::vector<at::Tensor>;

bool is_late(const at::Tensor& tensor) { return tensor.device().type() == kLate; }

std::mutex g_counts_mutex;
Counts g_counts;

// Those whose Meta kernel tells another form than the CPU's kernel gives: the dtype of statistics for bfloat16.
const std::set<std::string>& misleading() {
  static const std::set<std::string> names{"aten::native_layer_norm", "aten::native_layer_norm_backward"};
  return names;
}

// -- Arguments

// A value with each defined tensor in it replaced.
template <typename Change>
c10::IValue replaced(const c10::IValue& value, const Change& change) {
  if (value.isTensor()) {
    const auto tensor = value.toTensor();
    return tensor.defined() ? c10::IValue(change(tensor)) : value;
  }
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(change(tensor));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) {
      list.push_back(tensor && tensor->defined() ? std::optional(change(*tensor)) : tensor);
    }
    return list;
  }
  return value;
}

template <typename Act>
void for_each_tensor(const c10::IValue& value, const Act& act) {
  replaced(value, [&](const at::Tensor& tensor) {
    act(tensor);
    return tensor;
  });
}

// A host tensor as it is at the call. A number that torch has wrapped stays one: it promotes no dtype.
at::Tensor snapshot(const at::Tensor& tensor) {
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) return tensor;
  return tensor.clone();
}

at::Tensor on_meta(const at::Tensor& tensor) {
  return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta).pinned_memory(false));
}

// One call of an operator on tensors of one device.
class Call {
 public:
  Call(const c10::OperatorHandle& op, std::vector<c10::IValue> arguments)
      : op_(op), arguments_(std::move(arguments)), device_(find_device()) {}

  void run(Stack& stack) {
    const c10::DeviceGuard guard(c10::Device(kLate, device_));
    Stack metas;
    const bool is_told = infer(metas);
    {
      const std::lock_guard lock(g_counts_mutex);
      ++(is_told ? g_counts.asynchronous : g_counts.waited[name()]);
    }
    is_told ? run_later(metas, stack) : run_and_wait(stack);
  }

 private:
  std::string name() const { return c10::toString(op_.operator_name()); }
  const c10::FunctionSchema& schema() const { return op_.schema(); }

  // The device of all tensors, where host tensors are numbers or indices and are not changed; otherwise of an argument.
  c10::DeviceIndex find_device() const {
    std::optional<c10::Device> found;
    std::optional<c10::Device> asked;
    const auto check = [&](const at::Tensor& tensor) {
      TORCH_CHECK(!found || *found == tensor.device(), "Expected all tensors to be on the same device, but found at ",
                  "least two devices, ", *found, " and ", tensor.device(), "! (", name(), ")");
      found = tensor.device();
    };
    for (const auto& value : arguments_) {
      for_each_tensor(value, [&](const at::Tensor& tensor) {
        if (is_late(tensor)) check(tensor);
      });
      if (value.isDevice()) asked = value.toDevice();
    }
    for (std::size_t at = 0; at < arguments_.size(); ++at) {
      const auto* alias = schema().arguments()[at].alias_info();
      const bool is_written = alias && alias->isWrite();
      for_each_tensor(arguments_[at], [&](const at::Tensor& tensor) {
        const bool may_be_host = tensor.dim() == 0 || arguments_[at].isOptionalTensorList();
        if (!is_late(tensor) && (is_written || !may_be_host)) check(tensor);
      });
    }
    if (!found) found = asked;
    const auto index = found && found->has_index() ? found->index() : current_device();
    check_device(index);
    return index;
  }

  // -- Form

  // Results as the Meta kernel tells them; false where it does not.
  bool infer(Stack& metas) {
    if (misleading().count(schema().name())) return false;
    for (const auto& value : schema().returns()) {
      const bool is_list = value.type()->isSubtypeOf(*c10::ListType::ofTensors());
      if (!is_list && value.type()->kind() != c10::TypeKind::TensorType) return false;
    }
    const Plain plain;
    for (const auto& value : arguments_) {
      if (value.isDevice()) {
        metas.emplace_back(c10::Device(at::kMeta));
      } else if (value.isGenerator()) {
        metas.emplace_back();
      } else {
        metas.push_back(replaced(value, [&](const at::Tensor& tensor) {
          if (!is_late(tensor)) return tensor.dim() == 0 ? tensor : on_meta(tensor);
          auto& meta = metas_[tensor.unsafeGetTensorImpl()];
          if (!meta.defined()) meta = on_meta(tensor);
          return meta;
        }));
      }
    }
    try {
      op_.callBoxed(&metas);
    } catch (const std::exception&) {
      return false;  // none, or it needs values, or the arguments are wrong: the CPU's kernel will say so
    }
    return true;
  }

  // The argument that stands behind a tensor of another device; undefined where it is none's.
  template <typename Map>
  at::Tensor argument_of(const at::Tensor& tensor, const Map& made) const {
    at::Tensor found;
    for (const auto& value : arguments_) {
      for_each_tensor(value, [&](const at::Tensor& argument) {
        const auto place = made.find(argument.unsafeGetTensorImpl());
        if (place != made.end() && place->second.is_same(tensor)) found = argument;
      });
    }
    return found;
  }

  void check_is_no_view(std::size_t result) const {
    const auto* alias = schema().returns()[result].alias_info();
    TORCH_CHECK_NOT_IMPLEMENTED(!alias || alias->isWrite(), "late: ", name(), " returns a view");
  }

  // -- Tasks

  // Arguments for the CPU's kernel, to be used in a task.
  std::shared_ptr<Stack> on_cpu() {
    const Plain plain;
    auto stack = std::make_shared<Stack>();
    bool is_drawn = false;
    for (std::size_t at = 0; at < arguments_.size(); ++at) {
      const auto& value = arguments_[at];
      if (value.isDevice()) {
        stack->emplace_back(c10::Device(at::kCPU));
      } else if (draws(at)) {
        const auto given = value.isNone() ? std::nullopt : std::optional(value.toGenerator());
        stack->emplace_back(next_draw(device_, given));
        is_drawn = true;
      } else {
        stack->push_back(replaced(value, [&](const at::Tensor& tensor) {
          if (!is_late(tensor)) return snapshot(tensor);
          auto& made = cpus_[tensor.unsafeGetTensorImpl()];
          if (!made.defined()) made = View(tensor).tensor();
          return made;
        }));
      }
    }
    const bool is_random = op_.hasTag(at::Tag::nondeterministic_seeded);
    TORCH_CHECK_NOT_IMPLEMENTED(is_drawn || !is_random, "late: ", name(), " draws from no generator that can be given");
    return stack;
  }

  bool draws(std::size_t argument) const {
    const auto type = schema().arguments()[argument].type();
    const auto optional = type->cast<c10::OptionalType>();
    return (optional ? optional->getElementType() : type)->kind() == c10::TypeKind::GeneratorType;
  }

  void run_later(const Stack& metas, Stack& results) {
    for (const auto& value : arguments_) {  // those that are given for results
      for_each_tensor(value, [&](const at::Tensor& tensor) {
        const auto meta = metas_.find(tensor.unsafeGetTensorImpl());
        if (meta != metas_.end() && meta->second.sizes() != tensor.sizes()) tensor.resize_(meta->second.sizes());
      });
    }
    std::vector<std::optional<View>> views;  // of results that are new
    for (std::size_t at = 0; at < metas.size(); ++at) {
      results.push_back(replaced(metas[at], [&](const at::Tensor& meta) {
        if (auto argument = argument_of(meta, metas_); argument.defined()) {
          views.emplace_back();
          return argument;
        }
        check_is_no_view(at);
        auto made = at::empty_strided(meta.sizes(), meta.strides(), meta.options().device(kLate, device_));
        views.emplace_back(View(made));
        return made;
      }));
    }
    put(current_stream(device_), name(), [op = op_, stack = on_cpu(), views = std::move(views)] {
      const Plain plain;
      op.callBoxed(stack.get());
      std::size_t next = 0;
      for (const auto& value : *stack) {
        for_each_tensor(value, [&](const at::Tensor& tensor) {
          const auto& view = views.at(next++);
          if (!view) return;
          const auto target = view->tensor();
          TORCH_CHECK(target.sizes() == tensor.sizes() && target.scalar_type() == tensor.scalar_type(),
                      "the Meta kernel tells ", target.sizes(), " of ", target.scalar_type(), ", the CPU's gives ",
                      tensor.sizes(), " of ", tensor.scalar_type());
          target.copy_(tensor);
        });
      }
      stack->clear();
    });
  }

  void run_and_wait(Stack& results) {
    const auto stream = current_stream(device_);
    auto stack = on_cpu();
    auto error = std::make_shared<std::exception_ptr>();
    const auto ticket = put(stream, name(), [op = op_, stack, error] {
      const Plain plain;
      try {
        op.callBoxed(stack.get());
      } catch (...) {
        *error = std::current_exception();  // the caller's, who waits for it
      }
    });
    wait_for(key(stream), ticket);
    if (*error) std::rethrow_exception(*error);
    for (std::size_t at = 0; at < stack->size(); ++at) {
      results.push_back(replaced((*stack)[at], [&](const at::Tensor& tensor) {
        if (auto argument = argument_of(tensor, cpus_); argument.defined()) return argument;
        check_is_no_view(at);
        auto made = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(kLate, device_));
        put(stream, name(), [view = View(made), tensor] {
          const Plain plain;
          view.tensor().copy_(tensor);
        });
        return made;
      }));
    }
  }

  c10::OperatorHandle op_;
  std::vector<c10::IValue> arguments_;
  c10::DeviceIndex device_;
  std::map<c10::TensorImpl*, at::Tensor> metas_, cpus_;  // by the device's tensor that they stand for
};

void fallback(const c10::OperatorHandle& op, Stack* stack) {
  const auto count = op.schema().arguments().size();
  std::vector<c10::IValue> arguments(stack->end() - std::ptrdiff_t(count), stack->end());
  stack->resize(stack->size() - count);
  Call(op, std::move(arguments)).run(*stack);
}

// -- Copies, with CUDA's rules

// Whether bytes can be copied as they lie. Otherwise the host's side goes through memory that is not pinned.
bool is_plain(const at::Tensor& first, const at::Tensor& second) {
  return first.scalar_type() == second.scalar_type() && first.sizes() == second.sizes() &&
         first.strides() == second.strides() && first.is_non_overlapping_and_dense() &&
         first.is_neg() == second.is_neg() && first.is_conj() == second.is_conj();
}

bool is_pinned_tensor(const at::Tensor& tensor) { return is_pinned(tensor.const_data_ptr(), tensor.nbytes()); }

Ticket put_copy(c10::Stream stream, const at::Tensor& target, const at::Tensor& source) {
  return put(stream, "copy", [to = View(target), from = View(source)] {
    const Plain plain;
    to.tensor().copy_(from.tensor());
  });
}

void use_host(const at::Tensor& tensor, c10::Stream stream, Ticket ticket) {
  use_pinned(tensor.const_data_ptr(), tensor.storage().data_ptr().get_context(), key(stream), ticket);
}

void upload(const at::Tensor& source, const at::Tensor& target, bool is_async) {
  const auto stream = current_stream(target.device().index());
  Ticket ticket = 0;
  if (is_plain(source, target) && is_pinned_tensor(source)) {
    ticket = put_copy(stream, target, source);
    use_host(source, stream, ticket);
  } else {
    const Plain plain;
    auto staged = source.to(source.options().dtype(target.scalar_type()).pinned_memory(false), false, /*copy=*/true);
    ticket = put(stream, "copy", [to = View(target), staged] {
      const Plain plain;
      to.tensor().copy_(staged);
    });
  }
  if (!is_async) wait_for(key(stream), ticket);
}

void download(const at::Tensor& source, const at::Tensor& target, bool is_async) {
  const auto stream = current_stream(source.device().index());
  const bool is_late_there = is_async && is_plain(source, target) && is_pinned_tensor(target);
  const auto ticket = put_copy(stream, target, source);
  use_host(target, stream, ticket);
  if (!is_late_there) wait_for(key(stream), ticket);
}

void copy_on_device(const at::Tensor& source, const at::Tensor& target) {
  const auto from = current_stream(source.device().index());
  const auto to = current_stream(target.device().index());
  if (from != to) put_wait(from, put_mark(to));
  put_copy(from, target, source);
  if (from != to) put_wait(to, put_mark(from));
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool is_async) {
  if (target.numel() == 0) return target;
  TORCH_CHECK_NOT_IMPLEMENTED((source.is_cpu() || is_late(source)) && (target.is_cpu() || is_late(target)),
                              "late: no copy from ", source.device(), " to ", target.device());
  if (source.is_cpu()) {
    upload(source, target, is_async);
  } else if (target.is_cpu()) {
    download(source, target, is_async);
  } else {
    copy_on_device(source, target);
  }
  return target;
}

// -- Memory and views

c10::Device place_of(std::optional<c10::Device> device) {
  return {kLate, device && device->has_index() ? device->index() : current_device()};
}

at::Tensor empty(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
                 std::optional<c10::Device> device, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  const c10::DeviceGuard guard(place_of(device));
  return at::detail::empty_generic(size, &device_allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype,
                         std::optional<c10::Layout>, std::optional<c10::Device> device, std::optional<bool>) {
  const c10::DeviceGuard guard(place_of(device));
  return at::detail::empty_strided_generic(size, stride, &device_allocator(),
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

const at::Tensor& resize(const at::Tensor& self, c10::SymIntArrayRef size, std::optional<c10::MemoryFormat> format) {
  const auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  auto* impl = self.unsafeGetTensorImpl();
  const auto needed =
      at::detail::computeStorageNbytesContiguous(sizes, self.element_size(), std::size_t(self.storage_offset()));
  if (c10::multiply_integers(sizes) > 0 && needed > impl->unsafe_storage().nbytes()) {
    at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(impl->unsafe_storage(), needed);
  }
  impl->set_sizes_contiguous(sizes);
  if (format && *format != c10::MemoryFormat::Preserve) impl->empty_tensor_restride(*format);
  return self;
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  device_allocator().recordStream(self.storage().data_ptr(), stream);
}

// The CPU's draws from no generator that it is given.
std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& input, double p, std::optional<bool> train) {
  const auto options = input.options().dtype(at::kBool);
  if (p == 0 || !train.value_or(true)) return {input.clone(), at::ones_like(input, options)};
  auto mask = at::empty_like(input, options).bernoulli_(1 - p);
  return {input.mul(mask).mul_(p < 1 ? 1 / (1 - p) : 0.0), mask};
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("resize_", resize);
  library.impl("_copy_from", copy_from);
  library.impl("record_stream", record_stream);
  library.impl("native_dropout", native_dropout);
  library.impl("as_strided", at::cpu::as_strided_symint);
  library.impl("view", [](const at::Tensor& self, c10::SymIntArrayRef size) {
    return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
  });
  library.impl("_reshape_alias", [](const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
    return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
  });
  library.impl("unfold", at::native::unfold);
  library.impl("view_as_real", at::native::view_as_real);
  library.impl("view_as_complex", at::native::view_as_complex);
  library.impl("set_.source_Tensor", at::native::set_tensor_);
  library.impl("set_.source_Storage", [](at::Tensor& self, at::Storage source) -> at::Tensor& {
    return at::native::set_(self, std::move(source));
  });
  library.impl("set_.source_Storage_storage_offset",
               [](at::Tensor& self, at::Storage source, std::int64_t offset, c10::IntArrayRef size,
                  c10::IntArrayRef stride) -> at::Tensor& {
                 return at::cpu::set_(self, std::move(source), offset, size, stride);
               });
}

// Copies see to conjugate and negative tensors themselves: what torch does otherwise copies them, and so on.
TORCH_LIBRARY_IMPL(aten, Conjugate, library) { library.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, library) { library.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

// What is composed of other operators for a device without a kernel of its own, but has one on the CPU: the bits are
// to be that one's.
const bool g_has_whole_operators = [] {
  static auto* library =
      new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    const auto op = dispatcher.findOp(name);
    if (!op || name.name.rfind("aten::", 0) != 0 || !op->hasKernelForDispatchKey(c10::DispatchKey::CPU)) continue;
    const bool is_composed = op->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd) ||
                             op->hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd);
    if (!is_composed || op->hasKernelForDispatchKey(c10::DispatchKey::PrivateUse1)) continue;
    library->impl(c10::toString(name).c_str(), torch::CppFunction::makeFromBoxedFunction<&fallback>());
  }
  return true;
}();

}  // namespace

Counts counts() {
  const std::lock_guard lock(g_counts_mutex);
  return g_counts;
}

}  // namespace late
