#include "store_file.h"

#include <fcntl.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <limits>

namespace offload {
namespace {

constexpr std::uint64_t kUnknownRoom = std::uint64_t{1} << 60;

int allocate(int fd, std::uint64_t offset, std::uint64_t nbytes) {
  while (true) {
    if (fallocate(fd, 0, static_cast<off_t>(offset), static_cast<off_t>(nbytes)) == 0) return 0;
    if (errno != EINTR) return errno;
  }
}

}  // namespace

StoreFile::StoreFile(int fd, bool direct, const std::array<std::uint8_t, 16>& store, std::uint64_t max_bytes,
                     std::uint64_t extent_bytes)
    : fd_(fd), direct_(direct), store_(store), max_bytes_(max_bytes), extent_bytes_(extent_bytes) {}

StoreFile::~StoreFile() { ::close(fd_); }

int StoreFile::reserve(std::uint64_t end, bool exact) {
  std::lock_guard<std::mutex> growth(growth_mutex_);
  std::uint64_t target = end;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (max_bytes_ != 0 && end > max_bytes_) return ENOSPC;
    if (end <= allocated_bytes_ || !preallocate_) {
      used_bytes_ = std::max(used_bytes_, end);
      return 0;
    }
    if (!exact) target = std::max(end, allocated_bytes_ + extent_bytes_);
    if (max_bytes_ != 0) target = std::min(target, max_bytes_);
  }
  // `mutex_` is free meanwhile, so that nobody who asks for sizes waits for the file system. allocated_bytes_ may be
  // read without it: it changes only here, under growth_mutex_.
  int error = allocate(fd_, allocated_bytes_, target - allocated_bytes_);
  // Without room for a whole extent take just what is needed now; EFBIG likewise, where a limit
  // on file sizes lies inside the extent.
  if ((error == ENOSPC || error == EDQUOT || error == EFBIG) && target > end) {
    target = end;
    error = allocate(fd_, allocated_bytes_, target - allocated_bytes_);
  }
  std::lock_guard<std::mutex> lock(mutex_);
  if (error == EOPNOTSUPP || error == ENOSYS || error == EINVAL) {
    preallocate_ = false;  // this file system cannot; its writes report a full disk themselves
  } else if (error != 0) {
    return error;
  } else {
    allocated_bytes_ = target;
  }
  used_bytes_ = std::max(used_bytes_, end);
  return 0;
}

int StoreFile::sync(int injected_error) {
  int error = injected_error;
  while (error == 0 && fdatasync(fd_) != 0) {
    if (errno != EINTR) error = errno;
  }
  int none = 0;  // the first failure is the one that stays
  if (error != 0) sync_error_.compare_exchange_strong(none, error);
  return sync_error_.load();
}

std::uint64_t StoreFile::free_bytes() const {
  struct statvfs room{};
  std::uint64_t file_system = 0;
  if (fstatvfs(fd_, &room) == 0) {
    // Some file systems, many of FUSE among them, do not say how large they are.
    file_system = room.f_blocks == 0 ? kUnknownRoom : std::uint64_t{room.f_bavail} * room.f_frsize;
  }
  std::lock_guard<std::mutex> lock(mutex_);
  // What this file has allocated and not used is not free to the file system, but there is room for slots in it.
  file_system += allocated_bytes_ > used_bytes_ ? allocated_bytes_ - used_bytes_ : 0;
  const std::uint64_t allowed = max_bytes_ != 0 ? max_bytes_ - used_bytes_ : std::numeric_limits<std::uint64_t>::max();
  return std::min(file_system, allowed);
}

std::uint64_t StoreFile::used_bytes() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return used_bytes_;
}

}  // namespace offload
