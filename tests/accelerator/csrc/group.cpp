// Not done here: sending to and receiving from one rank, lists of tensors of different sizes.
#include "group.h"

#include <ATen/core/ivalue.h>
#include <ATen/ops/cat.h>
#include <c10/core/StreamGuard.h>

#include <map>
#include <mutex>

#include "memory.h"
#include "streams.h"
#include "view.h"

namespace late {
namespace {

using Tensors = std::vector<at::Tensor>;
using Lists = std::vector<Tensors>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using Collective = std::function<WorkPtr(Tensors& outputs, Tensors& inputs)>;

class LateWork final : public c10d::Work {
 public:
  LateWork(c10d::OpType type, Tensors outputs, c10::Stream stream)
      : c10d::Work(-1, type), outputs_(std::move(outputs)), mark_(put_mark(stream)) {
    const c10::StreamGuard guard(stream);  // where the future's events are recorded
    future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()),
                                                       std::vector<c10::Device>{stream.device()});
    future_->markCompleted(c10::IValue(outputs_));
  }

  bool isCompleted() override { return is_reached(*mark_); }
  bool isSuccess() const override { return is_reached(*mark_); }
  Tensors result() override { return outputs_; }
  void synchronize() override { put_wait(current_stream(mark_->stream.first), mark_); }
  bool wait(std::chrono::milliseconds /*timeout*/) override {
    retrieveOpType() == c10d::OpType::BARRIER ? wait_for(*mark_) : synchronize();
    return true;
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

 private:
  Tensors outputs_;
  std::shared_ptr<Mark> mark_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

Tensors flattened(const Lists& lists) {
  Tensors flat;
  for (const auto& list : lists) flat.insert(flat.end(), list.begin(), list.end());
  return flat;
}

Lists parted(const Tensors& flat, std::size_t lists) {
  Lists parts;
  const auto size = std::ptrdiff_t(lists ? flat.size() / lists : 0);
  for (auto at = flat.begin(); at != flat.end(); at += size) parts.emplace_back(at, at + size);
  return parts;
}

class Group final : public c10d::Backend {
 public:
  Group(c10::intrusive_ptr<c10d::Backend> host, Told told)
      : c10d::Backend(host->getRank(), host->getSize()), host_(std::move(host)), told_(std::move(told)) {}

  const std::string getBackendName() const override { return "late"; }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return run("broadcast", c10d::OpType::BROADCAST, tensors, {},
               [host = host_, options](Tensors& outputs, Tensors&) { return host->broadcast(outputs, options); });
  }

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return run("allreduce", c10d::OpType::ALLREDUCE, tensors, {},
               [this_group = self(), op = options.reduceOp](Tensors& outputs, Tensors&) {
                 for (auto& tensor : outputs) this_group->reduce_all(tensor, op);
                 return WorkPtr();
               });
  }

  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    return allreduce(tensors, options);
  }

  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    return run("reduce", c10d::OpType::REDUCE, tensors, {},
               [host = host_, options, rank = rank_](Tensors& outputs, Tensors&) {
                 Tensors changed = outputs;  // gloo changes those of other ranks, too
                 for (auto& tensor : changed) {
                   if (options.rootRank != rank) tensor = tensor.clone();
                 }
                 host->reduce(changed, options)->wait();
                 return WorkPtr();
               });
  }

  WorkPtr allgather(Lists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    return run("allgather", c10d::OpType::ALLGATHER, flattened(outputs), inputs,
               [host = host_, options](Tensors& flat, Tensors& ins) {
                 auto lists = parted(flat, ins.size());
                 return host->allgather(lists, ins, options);
               });
  }

  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    Tensors outputs{output}, inputs{input};
    return allgather_into_tensor_coalesced(outputs, inputs, options);
  }

  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) override {
    return run("allgather", c10d::OpType::_ALLGATHER_BASE, outputs, inputs,
               [host = host_, options](Tensors& outs, Tensors& ins) {
                 for (std::size_t at = 0; at < outs.size(); ++at) {
                   host->_allgather_base(outs[at], ins[at], options)->wait();
                 }
                 return WorkPtr();
               });
  }

  WorkPtr reduce_scatter(Tensors& outputs, Lists& inputs, const c10d::ReduceScatterOptions& options) override {
    return run("reduce_scatter", c10d::OpType::REDUCE_SCATTER, outputs, flattened(inputs),
               [this_group = self(), op = options.reduceOp](Tensors& outs, Tensors& flat) {
                 const auto lists = parted(flat, outs.size());
                 for (std::size_t at = 0; at < outs.size(); ++at) {
                   Tensors parts;
                   for (const auto& tensor : lists[at]) parts.push_back(tensor.reshape(-1));
                   this_group->reduce_part(outs[at], at::cat(parts), op);
                 }
                 return WorkPtr();
               });
  }

  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override {
    Tensors outputs{output}, inputs{input};
    return reduce_scatter_tensor_coalesced(outputs, inputs, options);
  }

  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options) override {
    return run("reduce_scatter", c10d::OpType::_REDUCE_SCATTER_BASE, outputs, inputs,
               [this_group = self(), op = options.reduceOp](Tensors& outs, Tensors& ins) {
                 for (std::size_t at = 0; at < outs.size(); ++at) {
                   this_group->reduce_part(outs[at], ins[at].clone(), op);
                 }
                 return WorkPtr();
               });
  }

  WorkPtr gather(Lists& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    return run("gather", c10d::OpType::GATHER, flattened(outputs), inputs,
               [host = host_, options, lists = outputs.size()](Tensors& flat, Tensors& ins) {
                 auto parts = parted(flat, lists);
                 return host->gather(parts, ins, options);
               });
  }

  WorkPtr scatter(Tensors& outputs, Lists& inputs, const c10d::ScatterOptions& options) override {
    return run("scatter", c10d::OpType::SCATTER, outputs, flattened(inputs),
               [host = host_, options, lists = inputs.size()](Tensors& outs, Tensors& flat) {
                 auto parts = parted(flat, lists);
                 return host->scatter(outs, parts, options);
               });
  }

  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<std::int64_t>& output_sizes,
                        std::vector<std::int64_t>& input_sizes, const c10d::AllToAllOptions& options) override {
    return run("alltoall", c10d::OpType::ALLTOALL_BASE, {output}, {input},
               [host = host_, options, output_sizes, input_sizes](Tensors& outs, Tensors& ins) mutable {
                 return host->alltoall_base(outs[0], ins[0], output_sizes, input_sizes, options);
               });
  }

  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    return run("barrier", c10d::OpType::BARRIER, {}, {},
               [host = host_, options](Tensors&, Tensors&) { return host->barrier(options); });
  }

 private:
  c10::intrusive_ptr<Group> self() { return c10::intrusive_ptr<Group>::reclaim_copy(this); }

  WorkPtr run(const char* name, c10d::OpType type, Tensors outputs, const Tensors& inputs, Collective collective) {
    told_(name);
    const auto device = !outputs.empty()  ? outputs[0].device().index()
                        : !inputs.empty() ? inputs[0].device().index()
                                          : current_device();
    const auto stream = stream_on(device);
    std::vector<View> outs, ins;
    for (const auto& tensor : outputs) outs.push_back(prepared(name, tensor, stream));
    for (const auto& tensor : inputs) ins.push_back(prepared(name, tensor, stream));
    put_wait(stream, put_mark(current_stream(device)));
    put(stream, name, [collective = std::move(collective), outs = std::move(outs), ins = std::move(ins)] {
      const Plain plain;
      Tensors host_outputs, host_inputs;
      for (const View& view : outs) host_outputs.push_back(view.tensor());
      for (const View& view : ins) host_inputs.push_back(view.tensor());
      if (const auto work = collective(host_outputs, host_inputs)) work->wait();
    });
    return c10::make_intrusive<LateWork>(type, std::move(outputs), stream);
  }

  static View prepared(const char* name, const at::Tensor& tensor, c10::Stream stream) {
    TORCH_CHECK(tensor.device() == stream.device(), "late: ", name, " of a tensor of ", tensor.device());
    TORCH_CHECK(tensor.is_contiguous(), "late: ", name, " of a tensor that is not contiguous");
    device_allocator().recordStream(tensor.storage().data_ptr(), stream);
    return View(tensor);
  }

  c10::Stream stream_on(c10::DeviceIndex device) {
    const std::lock_guard lock(mutex_);
    const auto found = streams_.find(device);
    return found != streams_.end() ? found->second : streams_.emplace(device, new_stream(device, 0)).first->second;
  }

  // In tasks: the sum over all ranks, or what else is asked for, of a host tensor in its place.
  void reduce_all(at::Tensor& tensor, const c10d::ReduceOp& op) {
    const bool is_mean = op == c10d::ReduceOp::AVG;
    c10d::AllreduceOptions options;
    options.reduceOp = is_mean ? c10d::ReduceOp(c10d::ReduceOp::SUM) : op;
    Tensors tensors{tensor};
    host_->allreduce(tensors, options)->wait();
    if (is_mean) tensor.div_(size_);
  }

  // In tasks: this rank's part of the reduced whole.
  void reduce_part(at::Tensor& output, at::Tensor whole, const c10d::ReduceOp& op) {
    reduce_all(whole, op);
    output.copy_(whole.view({size_, -1}).select(0, rank_).view(output.sizes()));
  }

  c10::intrusive_ptr<c10d::Backend> host_;
  Told told_;
  std::mutex mutex_;
  std::map<c10::DeviceIndex, c10::Stream> streams_;
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_group(c10::intrusive_ptr<c10d::Backend> host, Told told) {
  return c10::make_intrusive<Group>(std::move(host), std::move(told));
}

}  // namespace late
