// The ring: one thread of a path hands pieces of slots to the kernel and takes the results, so
// that many are in flight without a thread for each.
//
// Invariants: requests of a direction start in the order of submission; at most depth pieces of
// a direction are with the kernel (a depth of 64 needs 32 KiB for the ring). A slot's first piece is written together with its header, after
// all its other pieces. A sync completes after every write that was submitted before it.
// Checksums are taken in small parts between looks at the ring, of a write's pieces while the
// kernel is busy with them, so a long tile does not keep others from starting. All signals are
// blocked in the thread. After a fork the child's copy does nothing but go away.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <memory>

#include "../runtime/completion_queue.h"
#include "engine.h"

namespace offload {

class IoUring final : public IoEngine {
 public:
  // 0 where this engine can work in this process, else the errno that says why not.
  static int refusal() noexcept;

  // depth: pieces in flight, for each direction, 1 to kMostDepth. piece_bytes: most that one request
  // to the kernel moves, a multiple of kSectorBytes. checksum: compute and verify CRC32C of
  // payloads. queue must outlive this. Throws std::system_error.
  IoUring(CompletionQueue& queue, std::size_t depth, std::size_t piece_bytes, bool checksum);
  ~IoUring() override;
  IoUring(const IoUring&) = delete;
  IoUring& operator=(const IoUring&) = delete;

  void submit(IoRequest request) override;
  void set_depth(std::size_t depth) override;
  void inject(const FaultList::Fault& fault) override;
  void close() override;

 private:
  class Worker;
  const pid_t owner_;
  std::unique_ptr<Worker> worker_;
};

}  // namespace offload
