// What every I/O engine does to a slot apart from system calls: how it is cut into pieces, how a
// short transfer goes on, what its header has to say, and the faults that tests plan.
//
// Nothing here is thread-safe except planned_call (its list is); nothing blocks.
#pragma once

#include <sys/uio.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <memory>

#include "engine.h"

namespace offload {

// What a transfer came to: 0, an errno or a kError code, and where.
struct Outcome {
  std::int32_t error = 0;
  std::uint32_t checksum = 0;
  std::uint64_t offset = 0;
};

struct FreeDeleter {
  void operator()(void* memory) const { std::free(memory); }
};
using HeaderBuffer = std::unique_ptr<SlotHeader, FreeDeleter>;

// Memory for one header, aligned for O_DIRECT; throws std::bad_alloc.
HeaderBuffer make_header_buffer();

// What is still to be moved between at most two pieces of memory, one after the other, and one
// range of a file.
class Span {
 public:
  Span() = default;
  Span(void* first, std::size_t first_bytes, void* second, std::size_t second_bytes, std::uint64_t offset)
      : parts_{{first, first_bytes}, {second, second_bytes}}, offset_(offset) {}

  bool done() const { return parts_[0].iov_len + parts_[1].iov_len == 0; }
  std::uint64_t offset() const { return offset_; }

  // The memory of one system call that moves at most limit_bytes; returns how many parts it has.
  int call(std::size_t limit_bytes, iovec call[2]) const;

  // Take note that moved bytes have been moved. Returns 0, or an error where that was too little
  // to go on.
  std::int32_t advance(std::size_t moved, IoKind kind, bool direct);

 private:
  iovec parts_[2] = {};
  std::uint64_t offset_ = 0;
};

// How a slot is cut for system calls. Piece 0 has the header in front and exists always.
class Pieces {
 public:
  Pieces(const IoRequest& request, std::size_t piece_bytes)
      : payload_(static_cast<char*>(request.address)),
        nbytes_(request.identity.nbytes),
        offset_(request.offset),
        piece_bytes_(piece_bytes) {}

  std::size_t count() const { return nbytes_ == 0 ? 1 : (nbytes_ + piece_bytes_ - 1) / piece_bytes_; }
  char* payload(std::size_t index) const { return payload_ + index * piece_bytes_; }
  std::size_t payload_bytes(std::size_t index) const {
    return std::min<std::uint64_t>(piece_bytes_, nbytes_ - index * piece_bytes_);
  }
  Span span(std::size_t index, SlotHeader* header) const {
    if (index == 0) return Span(header, sizeof *header, payload(0), payload_bytes(0), offset_);
    const std::uint64_t offset = offset_ + sizeof *header + index * piece_bytes_;
    return Span(nullptr, 0, payload(index), payload_bytes(index), offset);
  }

 private:
  char* payload_;
  std::uint64_t nbytes_;
  std::uint64_t offset_;
  std::size_t piece_bytes_;
};

// End of the slot that a request is about.
inline std::uint64_t slot_end(const IoRequest& request) {
  return request.offset + sizeof(SlotHeader) + request.identity.nbytes;
}

// 0 where a header that was read is the one that was asked for, else a kError code.
std::int32_t admit(const SlotHeader& header, const IoRequest& request);

// What one system call may do: fail at once with error, or move limit_bytes at most.
struct PlannedCall {
  int error = 0;
  std::size_t limit_bytes = std::numeric_limits<std::size_t>::max();
};
PlannedCall planned_call(FaultList& faults, IoKind kind, bool direct);

// Throws std::invalid_argument unless an engine may have so many requests in flight.
void check_depth(std::size_t depth);

// Block all signals in threads that are started while this lives: they go to Python's main thread.
class SignalsBlocked {
 public:
  SignalsBlocked();
  ~SignalsBlocked();
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  struct Mask;
  std::unique_ptr<Mask> before_;
};

}  // namespace offload
