#include "ring.h"

#include <poll.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>

#if defined(__has_include)
#if __has_include(<linux/io_uring.h>)
#include <linux/io_uring.h>
#endif
#endif

namespace offload {
namespace {

// The kernel's interface, which does not change; see io_uring_setup(2) and io_uring_enter(2).
// The numbers of these calls are the same on all architectures but Alpha.
#if defined(__alpha__)
constexpr long kSetup = 535, kEnter = 536;
#else
constexpr long kSetup = 425, kEnter = 426;
#endif

using Opcode = std::uint8_t;
constexpr Opcode kNop = 0;
constexpr Opcode kReadVector = 1;
constexpr Opcode kWriteVector = 2;
constexpr Opcode kFsync = 3;
constexpr Opcode kPoll = 6;
constexpr Opcode kFallocate = 17;

constexpr std::uint32_t kFsyncData = 1u << 0;
constexpr unsigned kEnterGetEvents = 1u << 0;
constexpr std::uint64_t kMapRings = 0;
constexpr std::uint64_t kMapEntries = 0x10000000;

// One mapping for both rings (5.4); no result is ever dropped and what a request points to is
// read when it is submitted (5.5); all operations above exist (fast poll is of 5.7).
constexpr std::uint32_t kNeeded = 1u << 0 | 1u << 1 | 1u << 2 | 1u << 5;

struct Offsets {
  std::uint32_t head;
  std::uint32_t tail;
  std::uint32_t mask;
  std::uint32_t entries;
  std::uint32_t fifth;    // submission: flags; completion: overflow
  std::uint32_t sixth;    // submission: dropped; completion: results
  std::uint32_t seventh;  // submission: index array; completion: flags
  std::uint32_t reserved;
  std::uint64_t user_address;
};

struct Parameters {
  std::uint32_t entries;
  std::uint32_t result_entries;
  std::uint32_t flags;
  std::uint32_t poll_thread_cpu;
  std::uint32_t poll_thread_idle;
  std::uint32_t features;
  std::uint32_t workers_fd;
  std::uint32_t reserved[3];
  Offsets submission;
  Offsets completion;
};

static_assert(sizeof(RingEntry) == 64 && offsetof(RingEntry, token) == 32 && offsetof(RingEntry, buffer_index) == 40);
static_assert(sizeof(RingResult) == 16 && sizeof(Parameters) == 120);
#if defined(IORING_FEAT_FAST_POLL)
// Where the kernel's own description is at hand it has to agree.
static_assert(kNop == IORING_OP_NOP && kReadVector == IORING_OP_READV && kWriteVector == IORING_OP_WRITEV &&
              kFsync == IORING_OP_FSYNC && kPoll == IORING_OP_POLL_ADD && kFallocate == IORING_OP_FALLOCATE);
static_assert(kNeeded ==
              (IORING_FEAT_SINGLE_MMAP | IORING_FEAT_NODROP | IORING_FEAT_SUBMIT_STABLE | IORING_FEAT_FAST_POLL));
static_assert(kFsyncData == IORING_FSYNC_DATASYNC && kEnterGetEvents == IORING_ENTER_GETEVENTS &&
              kMapRings == IORING_OFF_SQ_RING && kMapEntries == IORING_OFF_SQES);
static_assert(offsetof(Parameters, features) == offsetof(io_uring_params, features) &&
              offsetof(Parameters, submission) == offsetof(io_uring_params, sq_off) &&
              offsetof(Parameters, completion) == offsetof(io_uring_params, cq_off) &&
              offsetof(Offsets, seventh) == offsetof(io_sqring_offsets, array) &&
              offsetof(Offsets, sixth) == offsetof(io_cqring_offsets, cqes));
#endif

template <typename T>
T* at(void* base, std::uint32_t offset) {
  return reinterpret_cast<T*>(static_cast<char*>(base) + offset);
}

void* map(int fd, std::size_t nbytes, std::uint64_t offset) {
  void* memory =
      mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, static_cast<off_t>(offset));
  if (memory == MAP_FAILED) return nullptr;
  madvise(memory, nbytes, MADV_DONTFORK);
  return memory;
}

}  // namespace

Ring::Ring(unsigned entries) {
  Parameters parameters{};
  fd_ = static_cast<int>(syscall(kSetup, entries, &parameters));
  if (fd_ < 0) throw std::system_error(errno, std::generic_category(), "io_uring_setup");
  if ((parameters.features & kNeeded) != kNeeded) {
    free();
    throw std::system_error(ENOSYS, std::generic_category(), "this kernel's io_uring is too old");
  }
  const Offsets& submission = parameters.submission;
  const Offsets& completion = parameters.completion;
  rings_bytes_ = std::max<std::size_t>(submission.seventh + parameters.entries * sizeof(std::uint32_t),
                                       completion.sixth + parameters.result_entries * sizeof(RingResult));
  entries_bytes_ = parameters.entries * sizeof(RingEntry);
  rings_ = map(fd_, rings_bytes_, kMapRings);
  entries_ = static_cast<RingEntry*>(map(fd_, entries_bytes_, kMapEntries));
  if (rings_ == nullptr || entries_ == nullptr) {
    const int error = errno;
    free();
    throw std::system_error(error, std::generic_category(), "mapping a ring");
  }
  head_ = at<std::uint32_t>(rings_, submission.head);
  tail_ = at<std::uint32_t>(rings_, submission.tail);
  mask_ = *at<std::uint32_t>(rings_, submission.mask);
  result_head_ = at<std::uint32_t>(rings_, completion.head);
  result_tail_ = at<std::uint32_t>(rings_, completion.tail);
  result_mask_ = *at<std::uint32_t>(rings_, completion.mask);
  results_ = at<RingResult>(rings_, completion.sixth);
  // Entries are used in turn, so each place of the ring names the entry of its own number.
  auto* names = at<std::uint32_t>(rings_, submission.seventh);
  for (std::uint32_t i = 0; i < parameters.entries; ++i) names[i] = i;
}

Ring::~Ring() { free(); }

void Ring::free() noexcept {
  if (entries_ != nullptr) munmap(entries_, entries_bytes_);
  if (rings_ != nullptr) munmap(rings_, rings_bytes_);
  if (fd_ >= 0) ::close(fd_);
}

int Ring::refusal() noexcept {
  try {
    Ring ring(2);
    ring.nop(1);
    unsigned submitted = 0;
    int error = 0;
    do error = ring.enter(true, &submitted);
    while (error == EINTR);
    if (error != 0) return error;
    RingResult result{};
    return ring.take(&result) ? -result.result : EIO;
  } catch (const std::system_error& error) {
    return error.code().value();
  }
}

RingEntry* Ring::prepare(std::uint8_t opcode, int fd, std::uint64_t token) {
  const std::uint32_t tail = *tail_;
  RingEntry* entry = &entries_[tail & mask_];
  std::memset(entry, 0, sizeof *entry);
  entry->opcode = opcode;
  entry->fd = fd;
  entry->token = token;
  // Nobody looks before enter, so the caller may still fill it in.
  __atomic_store_n(tail_, tail + 1, __ATOMIC_RELEASE);
  return entry;
}

void Ring::nop(std::uint64_t token) { prepare(kNop, -1, token); }

void Ring::transfer(bool write, int fd, const iovec* parts, int count, std::uint64_t offset, std::uint64_t token) {
  RingEntry* entry = prepare(write ? kWriteVector : kReadVector, fd, token);
  entry->offset = offset;
  entry->address = reinterpret_cast<std::uintptr_t>(parts);
  entry->length = static_cast<std::uint32_t>(count);
}

void Ring::datasync(int fd, std::uint64_t token) { prepare(kFsync, fd, token)->operation_flags = kFsyncData; }

void Ring::allocate(int fd, std::uint64_t offset, std::uint64_t nbytes, std::uint64_t token) {
  RingEntry* entry = prepare(kFallocate, fd, token);
  entry->offset = offset;
  entry->address = nbytes;  // where this operation keeps its length
}

void Ring::poll_readable(int fd, std::uint64_t token) { prepare(kPoll, fd, token)->operation_flags = POLLIN; }

int Ring::enter(bool wait, unsigned* submitted) noexcept {
  const std::uint32_t prepared = *tail_ - __atomic_load_n(head_, __ATOMIC_ACQUIRE);
  const long taken = syscall(kEnter, fd_, prepared, wait ? 1u : 0u, wait ? kEnterGetEvents : 0u, nullptr, 0);
  *submitted = taken > 0 ? static_cast<unsigned>(taken) : 0;
  return taken < 0 ? errno : 0;
}

void Ring::discard() noexcept { __atomic_store_n(tail_, __atomic_load_n(head_, __ATOMIC_ACQUIRE), __ATOMIC_RELEASE); }

bool Ring::take(RingResult* result) noexcept {
  const std::uint32_t head = *result_head_;
  if (head == __atomic_load_n(result_tail_, __ATOMIC_ACQUIRE)) return false;
  *result = results_[head & result_mask_];
  __atomic_store_n(result_head_, head + 1, __ATOMIC_RELEASE);
  return true;
}

}  // namespace offload
