// The thread pool: blocking preadv and pwritev on threads of one path, reads and writes apart,
// so that a path is busy in both directions whatever the other one does.
//
// Invariants: each submitted request gives exactly one completion on the queue that the pool was
// made with: all bytes, verified as the request says, or an error. A short transfer is continued
// inside. A payload is looked at only by its PayloadSum. Requests of a direction start in the
// order of submission. A sync completes after every write that was submitted before it. The threads
// never call Python. All signals are blocked in them, so that they go to Python's main thread. After
// a fork the child's copy does nothing but go away.
// Not done here: choosing slots, paths or order; limiting what is in flight.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "../runtime/completion_queue.h"
#include "header.h"
#include "store_file.h"

namespace offload {

enum class IoKind : int { kRead = 0, kWrite = 1, kSync = 2, kAllocate = 3 };

struct IoRequest {
  IoKind kind = IoKind::kRead;  // kAllocate is for faults only
  std::uint64_t op = 0;
  std::shared_ptr<StoreFile> file;
  std::uint64_t offset = 0;  // of the slot, a multiple of kSectorBytes
  SlotIdentity identity;     // nbytes: payload length, a multiple of kSectorBytes
  void* address = nullptr;   // of the payload, a multiple of kSectorBytes; lent until completion
  PayloadTerms terms;
};

// Faults for tests, counted in system calls: the nth next call of a kind fails with an errno
// (EINTR is retried like a real one) or moves at most limit_bytes. Thread-safe; costs one
// relaxed load a call while none is set.
class FaultList {
 public:
  struct Fault {
    IoKind kind = IoKind::kRead;
    std::uint64_t nth = 1;  // 1: the next call
    int error = 0;          // > 0: fail with this errno
    std::size_t limit_bytes = 0;
  };

  void add(const Fault& fault) {
    std::lock_guard<std::mutex> lock(mutex_);
    faults_.push_back(fault);
    any_.store(true, std::memory_order_relaxed);
  }

  // Count one call of this kind, for all faults of the kind. Return whether any is due by it; all that are due are
  // removed, and the last one added of these is written to *fired.
  bool due(IoKind kind, Fault* fired) {
    if (!any_.load(std::memory_order_relaxed)) return false;
    std::lock_guard<std::mutex> lock(mutex_);
    bool found = false;
    for (std::size_t i = 0; i < faults_.size();) {
      if (faults_[i].kind == kind && --faults_[i].nth == 0) {
        *fired = faults_[i];
        found = true;
        faults_.erase(faults_.begin() + static_cast<std::ptrdiff_t>(i));
      } else {
        ++i;
      }
    }
    any_.store(!faults_.empty(), std::memory_order_relaxed);
    return found;
  }

 private:
  std::atomic<bool> any_{false};
  std::mutex mutex_;
  std::vector<Fault> faults_;
};

// Most requests of a direction that may be in flight.
constexpr std::size_t kMostDepth = 64;

class IoThreads {
 public:
  // depth: threads for each direction, 1 to kMostDepth. piece_bytes: most that one system call moves, a
  // multiple of kSectorBytes; a piece is checked right after it was read, while it is in cache.
  // queue must outlive this.
  IoThreads(CompletionQueue& queue, std::size_t depth, std::size_t piece_bytes);
  ~IoThreads();
  IoThreads(const IoThreads&) = delete;
  IoThreads& operator=(const IoThreads&) = delete;

  // Start a request; never blocks on I/O. Throws std::runtime_error after close.
  void submit(IoRequest request);

  // Have at most so many requests of each direction in flight from now on, 1 to kMostDepth;
  // nothing is in flight meanwhile. Throws std::invalid_argument or std::runtime_error.
  void set_depth(std::size_t depth);

  // For tests; see FaultList.
  void inject(const FaultList::Fault& fault);

  // Finish everything in flight (each with its completion) and join the threads; idempotent.
  void close();

 private:
  struct State;
  const pid_t owner_;
  std::unique_ptr<State> state_;
};

}  // namespace offload
