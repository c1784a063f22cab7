// The one data file of a store on a path: its descriptor and how it grows.
//
// Invariants: allocated_bytes never shrinks; used_bytes <= allocated_bytes unless the file
// system cannot preallocate. Thread-safe. Not done here: transfers (those of io_threads.h)
// and which slot holds what (the caller's).
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <mutex>

namespace offload {

class StoreFile {
 public:
  // Takes over fd, which is open for reading and writing, and closes it at the end. direct:
  // it was opened with O_DIRECT. max_bytes: the file never grows beyond (0: no limit).
  // extent_bytes: how much is preallocated at a time.
  StoreFile(int fd, bool direct, const std::array<std::uint8_t, 16>& store, std::uint64_t max_bytes,
            std::uint64_t extent_bytes);
  ~StoreFile();
  StoreFile(const StoreFile&) = delete;
  StoreFile& operator=(const StoreFile&) = delete;

  int fd() const { return fd_; }
  bool direct() const { return direct_; }
  const std::array<std::uint8_t, 16>& store() const { return store_; }

  // Make sure that bytes up to end are allocated. Returns 0 or an errno: ENOSPC beyond
  // max_bytes or where the file system has no room even for what is needed now. exact: nothing
  // beyond that is allocated.
  int reserve(std::uint64_t end, bool exact = false);

  // fdatasync. A failure stays: the kernel reports lost pages once only, so a later success
  // would be a lie. Returns 0 or an errno.
  int sync(int injected_error);

  // Bytes by which slots may grow beyond the furthest that was reserved; the lesser of the
  // file system's room and max_bytes.
  std::uint64_t free_bytes() const;

  std::uint64_t used_bytes() const;

 private:
  const int fd_;
  const bool direct_;
  const std::array<std::uint8_t, 16> store_;
  const std::uint64_t max_bytes_;
  const std::uint64_t extent_bytes_;
  std::mutex growth_mutex_;   // held while reserve allocates
  mutable std::mutex mutex_;  // of what follows, which changes under both
  std::uint64_t allocated_bytes_ = 0;
  std::uint64_t used_bytes_ = 0;
  bool preallocate_ = true;
  std::atomic<int> sync_error_{0};
};

}  // namespace offload
