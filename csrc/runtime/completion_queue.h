// One queue that every native lane reports to.
//
// Invariants: a completion is pushed exactly once for each submitted operation;
// push never blocks on a reader; wait is called by one thread (the session's).
// Not done here: ordering between lanes (the queue is first come, first served).
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <ctime>
#include <deque>
#include <mutex>
#include <vector>

namespace offload {

// What a lane says when an operation has ended.
struct Completion {
  std::uint64_t op = 0;      // the id the operation was submitted with
  std::int32_t error = 0;    // 0, an errno (> 0), or one of the codes below (< 0)
  std::uint64_t detail = 0;  // of a failure: where; of a tile that was moved: CRC32C of its payload; 0 where none is known
  double started_s = 0.0;    // CLOCK_MONOTONIC, when a thread took the operation up
  double finished_s = 0.0;   // CLOCK_MONOTONIC, when it was through
};

// Errors that are not an errno. Python names them in offload/protocols.py.
enum : std::int32_t {
  kErrorHeader = -1,    // the slot's header is not a header of ours, or is another tile's
  kErrorChecksum = -2,  // the payload does not have the checksum that the header promises
  kErrorShort = -3,     // end of file before the last byte
};

inline double monotonic_seconds() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

// Thread-safe; many producers, one consumer.
class CompletionQueue {
 public:
  void push(const Completion& completion) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      items_.push_back(completion);
      pushed_s_ = monotonic_seconds();
    }
    ready_.notify_one();
  }

  // Wake the reader with an op that no lane reports: it does not count as a sign of life.
  void nudge(std::uint64_t op) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      Completion completion;
      completion.op = op;
      items_.push_back(completion);
    }
    ready_.notify_one();
  }

  // Seconds since the last push.
  double silence_s() {
    std::lock_guard<std::mutex> lock(mutex_);
    return monotonic_seconds() - pushed_s_;
  }

  // Take all that has arrived; wait up to timeout_s (< 0: for ever) if nothing has.
  std::vector<Completion> wait(double timeout_s) {
    std::unique_lock<std::mutex> lock(mutex_);
    auto filled = [this] { return !items_.empty(); };
    if (timeout_s < 0) {
      ready_.wait(lock, filled);
    } else {
      ready_.wait_for(lock, std::chrono::duration<double>(timeout_s), filled);
    }
    std::vector<Completion> taken(items_.begin(), items_.end());
    items_.clear();
    return taken;
  }

 private:
  std::mutex mutex_;
  std::condition_variable ready_;
  std::deque<Completion> items_;
  double pushed_s_ = 0.0;
};

}  // namespace offload
