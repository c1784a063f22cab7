// An I/O engine for tests: a request is in flight until somebody says that it has ended. No
// memory is touched and nothing is moved.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <utility>

#include "../runtime/completion_queue.h"
#include "engine.h"

namespace offload {

class HeldIo final : public IoEngine {
 public:
  explicit HeldIo(CompletionQueue& queue) : queue_(queue) {}

  void submit(IoRequest request) override {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (closed_) throw std::runtime_error("I/O is closed");
      arrived_.push_back(request.op);
      requests_.emplace(request.op, std::move(request));
    }
    changed_.notify_one();
  }

  // Wait for the next request that has arrived, in that order; its op, or nullopt after timeout_s.
  std::optional<std::uint64_t> started(double timeout_s) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (!changed_.wait_for(lock, std::chrono::duration<double>(timeout_s), [this] { return !arrived_.empty(); }))
      return std::nullopt;
    const std::uint64_t op = arrived_.front();
    arrived_.pop_front();
    return op;
  }

  // End a request with an error (0: success).
  void finish(std::uint64_t op, int error) {
    std::unique_lock<std::mutex> lock(mutex_);
    const auto found = requests_.find(op);
    if (found == requests_.end()) throw std::invalid_argument("no such request is in flight");
    IoRequest request = std::move(found->second);
    requests_.erase(found);
    lock.unlock();
    end(std::move(request), error);
  }

  void close() override {
    std::map<std::uint64_t, IoRequest> left;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      closed_ = true;
      left.swap(requests_);
      arrived_.clear();
    }
    for (auto& entry : left) end(std::move(entry.second), 0);
  }

 private:
  void end(IoRequest request, int error) {
    request.turn.reset();
    Completion completion;
    completion.op = request.op;
    completion.error = error;
    completion.started_s = completion.finished_s = monotonic_seconds();
    queue_.push(completion);
  }

  CompletionQueue& queue_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::uint64_t> arrived_;
  std::map<std::uint64_t, IoRequest> requests_;
  bool closed_ = false;
};

}  // namespace offload
