#include "transfer.h"

#include <pthread.h>
#include <signal.h>

#include <cerrno>
#include <new>
#include <stdexcept>
#include <string>

#include "../runtime/completion_queue.h"

namespace offload {

HeaderBuffer make_header_buffer() {
  void* memory = std::aligned_alloc(kSectorBytes, sizeof(SlotHeader));
  if (memory == nullptr) throw std::bad_alloc();
  return HeaderBuffer(static_cast<SlotHeader*>(memory));
}

int Span::call(std::size_t limit_bytes, iovec call[2]) const {
  int count = 0;
  for (const iovec& part : parts_) {
    const std::size_t length = std::min(part.iov_len, limit_bytes);
    if (length == 0) continue;
    call[count++] = {part.iov_base, length};
    limit_bytes -= length;
  }
  return count;
}

std::int32_t Span::advance(std::size_t moved, IoKind kind, bool direct) {
  // O_DIRECT goes on at sector boundaries only. What is left of a sector is either the end of a
  // file that was cut, or will be moved again.
  if (direct) moved -= moved % kSectorBytes;
  if (moved == 0) return kind == IoKind::kRead ? kErrorShort : EIO;
  offset_ += moved;
  for (iovec& part : parts_) {
    const std::size_t used = std::min(part.iov_len, moved);
    part.iov_base = static_cast<char*>(part.iov_base) + used;
    part.iov_len -= used;
    moved -= used;
  }
  return 0;
}

std::int32_t admit(const SlotHeader& header, const IoRequest& request) {
  if (check_header(header, request.identity) != 0) return kErrorHeader;
  return request.has_expected_crc && request.expected_crc != header.payload_crc ? kErrorChecksum : 0;
}

PlannedCall planned_call(FaultList& faults, IoKind kind, bool direct) {
  PlannedCall planned;
  FaultList::Fault fault;
  if (!faults.due(kind, &fault)) return planned;
  planned.error = fault.error;
  if (fault.error == 0) {
    planned.limit_bytes = fault.limit_bytes;
    if (direct) planned.limit_bytes = (fault.limit_bytes + kSectorBytes - 1) / kSectorBytes * kSectorBytes;
  }
  return planned;
}

void check_depth(std::size_t depth) {
  if (depth < 1 || depth > kMostDepth)
    throw std::invalid_argument("depth must be from 1 to " + std::to_string(kMostDepth));
}

struct SignalsBlocked::Mask {
  sigset_t set;
};

SignalsBlocked::SignalsBlocked() : before_(std::make_unique<Mask>()) {
  sigset_t all;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before_->set);
}

SignalsBlocked::~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_->set, nullptr); }

}  // namespace offload
