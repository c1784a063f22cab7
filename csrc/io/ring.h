// A minimal io_uring: system calls and shared memory, and nothing above them.
//
// Speaks the kernel's interface itself, so that neither a library nor headers of a certain age
// are needed, neither to build nor to run. One thread at a time uses a ring. No polling modes.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>

namespace offload {

// One request to the kernel; 64 bytes of its interface.
struct RingEntry {
  std::uint8_t opcode;
  std::uint8_t flags;
  std::uint16_t priority;
  std::int32_t fd;
  std::uint64_t offset;
  std::uint64_t address;
  std::uint32_t length;
  std::uint32_t operation_flags;
  std::uint64_t token;  // comes back with the result
  std::uint16_t buffer_index;
  std::uint16_t personality;
  std::int32_t other_fd;
  std::uint64_t unused[2];
};

// One answer; 16 bytes of its interface.
struct RingResult {
  std::uint64_t token;
  std::int32_t result;  // as the system call's, or -errno
  std::uint32_t flags;
};

class Ring {
 public:
  // entries: most requests that are prepared or in flight at a time. Throws std::system_error.
  explicit Ring(unsigned entries);
  ~Ring();
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;

  // 0 where rings work in this process, else the errno of what refused: ENOSYS (no io_uring, or
  // one older than Linux 5.7), EPERM or another (forbidden, as in many containers).
  static int refusal() noexcept;

  // Prepare requests; nothing happens before enter. All other fields are zero.
  void nop(std::uint64_t token);
  void transfer(bool write, int fd, const iovec* parts, int count, std::uint64_t offset, std::uint64_t token);
  void datasync(int fd, std::uint64_t token);
  void allocate(int fd, std::uint64_t offset, std::uint64_t nbytes, std::uint64_t token);
  void poll_readable(int fd, std::uint64_t token);

  // Hand over what is prepared and, if asked to, wait until there is a result. Returns 0 or an
  // errno; *submitted tells how many requests, in order, the kernel has taken.
  int enter(bool wait, unsigned* submitted) noexcept;

  // Forget what is prepared and not taken.
  void discard() noexcept;

  // Take one result if there is one.
  bool take(RingResult* result) noexcept;

 private:
  RingEntry* prepare(std::uint8_t opcode, int fd, std::uint64_t token);
  void free() noexcept;

  int fd_ = -1;
  void* rings_ = nullptr;
  std::size_t rings_bytes_ = 0;
  RingEntry* entries_ = nullptr;
  std::size_t entries_bytes_ = 0;
  unsigned mask_ = 0;
  unsigned result_mask_ = 0;
  std::uint32_t* head_ = nullptr;         // of the submission ring; the kernel's
  std::uint32_t* tail_ = nullptr;         // ours
  std::uint32_t* result_head_ = nullptr;  // of the completion ring; ours
  std::uint32_t* result_tail_ = nullptr;  // the kernel's
  RingResult* results_ = nullptr;
};

}  // namespace offload
