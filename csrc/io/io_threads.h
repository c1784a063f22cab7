// The thread pool: blocking preadv and pwritev on threads of one path, reads and writes apart,
// so that a path is busy in both directions whatever the other one does.
//
// Invariants: requests of a direction start in the order of submission. A sync completes after
// every write that was submitted before it. All signals are blocked in the threads, so that
// they go to Python's main thread. After a fork the child's copy does nothing but go away.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>

#include "../runtime/completion_queue.h"
#include "engine.h"

namespace offload {

class IoThreads final : public IoEngine {
 public:
  // depth: threads for each direction, 1 to kMostDepth. piece_bytes: most that one system call moves, a
  // multiple of kSectorBytes; a piece is checked right after it was read, while it is in cache.
  // checksum: compute and verify CRC32C of payloads. queue must outlive this.
  IoThreads(CompletionQueue& queue, std::size_t depth, std::size_t piece_bytes, bool checksum);
  ~IoThreads() override;
  IoThreads(const IoThreads&) = delete;
  IoThreads& operator=(const IoThreads&) = delete;

  void submit(IoRequest request) override;
  void close() override;
  void set_depth(std::size_t depth) override;
  void inject(const FaultList::Fault& fault) override;

 private:
  struct State;
  const pid_t owner_;
  std::unique_ptr<State> state_;
};

}  // namespace offload
