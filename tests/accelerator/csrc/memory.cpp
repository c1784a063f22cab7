#include "memory.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>
#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <bit>
#include <cstring>
#include <exception>
#include <map>
#include <mutex>
#include <vector>

namespace late {
namespace {

constexpr std::size_t kRange = std::size_t(16) << 30;  // addresses of a device
constexpr std::size_t kAlign = 512;
constexpr int kFill = 0xFF;

struct Mappings {
  char* seen;
  char* real;
};

const Mappings& mappings() {
  static const Mappings made = [] {
    const std::size_t size = kRange * kMostDevices;
    const int file = memfd_create("late", MFD_CLOEXEC);
    TORCH_CHECK(file >= 0 && ftruncate(file, off_t(size)) == 0, "late: no file for the device's memory");
    void* real = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
    void* seen = mmap(nullptr, size, PROT_NONE, MAP_SHARED | MAP_NORESERVE, file, 0);
    close(file);
    TORCH_CHECK(real != MAP_FAILED && seen != MAP_FAILED, "late: no addresses for the device's memory");
    return Mappings{static_cast<char*>(seen), static_cast<char*>(real)};
  }();
  return made;
}

// The last work of streams after which memory may be given out again.
using Uses = std::map<StreamKey, Ticket>;

bool are_over(const Uses& uses) {
  for (const auto& [stream, ticket] : uses) {
    if (!has_reached(stream, ticket)) return false;
  }
  return true;
}

// -- Device memory

struct Block {
  char* address;
  std::size_t nbytes;
  StreamKey stream;
  Uses uses;
};

// One device: blocks that are out, dropped ones that other streams still use, cached ones, and what is free.
struct Pool {
  std::size_t limit = std::size_t(4) << 30;
  std::map<std::size_t, std::size_t> gaps{{0, kRange}};  // sizes by offset; no two touch
  std::map<char*, Block> live;
  std::vector<Block> dropped;
  std::map<std::pair<c10::StreamId, std::size_t>, std::vector<Block>> cached;  // newest last
  c10::CachingDeviceAllocator::DeviceStats stats;

  std::size_t reserved() const { return std::size_t(stats.reserved_bytes[0].current); }

  void settle() {
    std::erase_if(dropped, [&](const Block& block) {
      if (!are_over(block.uses)) return false;
      cache(block);
      return true;
    });
  }

  void cache(Block block) {
    block.uses.clear();
    cached[{block.stream.second, block.nbytes}].push_back(std::move(block));
  }

  std::size_t cached_bytes() const {
    std::size_t sum = 0;
    for (const auto& [_, blocks] : cached) {
      for (const Block& block : blocks) sum += block.nbytes;
    }
    for (const Block& block : dropped) sum += block.nbytes;
    return sum;
  }

  // The offset of so many free bytes, the lowest there is; nothing where the device is full.
  std::optional<std::size_t> take(std::size_t nbytes) {
    if (reserved() + nbytes > limit) return std::nullopt;
    for (auto gap = gaps.begin(); gap != gaps.end(); ++gap) {
      auto [offset, size] = *gap;
      if (size < nbytes) continue;
      gaps.erase(gap);
      if (size > nbytes) gaps[offset + nbytes] = size - nbytes;
      stats.reserved_bytes[0].increase(nbytes);
      stats.segment[0].increase(1);
      ++stats.num_device_alloc;
      return offset;
    }
    return std::nullopt;
  }

  void give(std::size_t offset, std::size_t nbytes) {
    stats.reserved_bytes[0].decrease(nbytes);
    stats.segment[0].decrease(1);
    ++stats.num_device_free;
    auto next = gaps.lower_bound(offset);
    if (next != gaps.end() && next->first == offset + nbytes) {
      nbytes += next->second;
      next = gaps.erase(next);
    }
    if (next != gaps.begin()) {
      auto before = std::prev(next);
      if (before->first + before->second == offset) {
        before->second += nbytes;
        return;
      }
    }
    gaps[offset] = nbytes;
  }
};

void drop_block(void* address);

class DeviceMemory final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(std::size_t nbytes) override {
    const auto device = current_device();
    const c10::Device place(kLate, device);
    if (nbytes == 0) return {nullptr, nullptr, &drop_block, place};
    const std::size_t size = (nbytes + kAlign - 1) / kAlign * kAlign;
    const auto stream = current_stream(device);
    check_error(device);
    char* address = nullptr;
    {
      std::unique_lock lock(mutex_);
      Block block = find(lock, device, size, key(stream));
      address = block.address;
      auto& stats = pools_[device].stats;
      for (auto* stat : {&stats.allocated_bytes, &stats.active_bytes}) (*stat)[0].increase(size);
      for (auto* stat : {&stats.allocation, &stats.active}) (*stat)[0].increase(1);
      stats.requested_bytes[0].increase(size);
      pools_[device].live.emplace(address, std::move(block));
    }
    c10::DataPtr made(address, address, &drop_block, place);
    put(stream, "fill", [at = real(address), size] { std::memset(at, kFill, size); });
    return made;
  }

  void drop(char* address) {
    const auto device = device_of(address);
    if (!device) return;
    const std::lock_guard lock(mutex_);
    auto& pool = pools_[*device];
    const auto found = pool.live.find(address);
    if (found == pool.live.end()) return;
    Block block = std::move(found->second);
    pool.live.erase(found);
    for (auto* stat : {&pool.stats.allocated_bytes, &pool.stats.active_bytes}) (*stat)[0].decrease(block.nbytes);
    for (auto* stat : {&pool.stats.allocation, &pool.stats.active}) (*stat)[0].decrease(1);
    pool.stats.requested_bytes[0].decrease(block.nbytes);
    for (auto& [stream, ticket] : block.uses) ticket = last_ticket(stream);
    if (are_over(block.uses)) {
      pool.cache(std::move(block));
    } else {
      pool.dropped.push_back(std::move(block));
    }
  }

  void recordStream(const c10::DataPtr& pointer, c10::Stream stream) override {
    const auto device = device_of(pointer.get());
    if (!device) return;
    const std::lock_guard lock(mutex_);
    const auto found = pools_[*device].live.find(static_cast<char*>(pointer.get()));
    if (found != pools_[*device].live.end() && found->second.stream != key(stream)) found->second.uses[key(stream)] = 0;
  }

  void emptyCache(c10::MempoolId_t /*pool*/) override {
    std::unique_lock lock(mutex_);
    for (int device = 0; device < device_count(); ++device) free_cached(lock, c10::DeviceIndex(device));
  }

  void set_limit(c10::DeviceIndex device, std::size_t nbytes) {
    check_device(device);
    TORCH_CHECK(nbytes <= kRange, "late: a device has ", kRange, " bytes at most");
    const std::lock_guard lock(mutex_);
    pools_[device].limit = nbytes;
  }

  std::pair<std::size_t, std::size_t> getMemoryInfo(c10::DeviceIndex device) override {
    check_device(device);
    check_error(device);
    const std::lock_guard lock(mutex_);
    const auto& pool = pools_[device];
    return {pool.limit - std::min(pool.limit, pool.reserved()), pool.limit};
  }

  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    check_device(device);
    const std::lock_guard lock(mutex_);
    return pools_[device].stats;
  }

  void resetAccumulatedStats(c10::DeviceIndex device) override {
    for_each_stat(device, [](c10::CachingAllocator::Stat& stat) { stat.reset_accumulated(); });
  }

  void resetPeakStats(c10::DeviceIndex device) override {
    for_each_stat(device, [](c10::CachingAllocator::Stat& stat) { stat.reset_peak(); });
  }

  c10::DeleterFnPtr raw_deleter() const override { return &drop_block; }
  bool initialized() override { return true; }

  void copy_data(void* target, const void* source, std::size_t nbytes) const override {
    const auto stream = current_stream(device_of(target).value_or(current_device()));
    put(stream, "copy", [to = real(target), from = real(source), nbytes] { std::memmove(to, from, nbytes); });
  }

 private:
  // A block of that size: cached, new, or new after all that was cached is given back.
  Block find(std::unique_lock<std::mutex>& lock, c10::DeviceIndex device, std::size_t size, StreamKey stream) {
    auto& pool = pools_[device];
    pool.settle();
    auto& cached = pool.cached[{stream.second, size}];
    if (!cached.empty()) {
      Block block = std::move(cached.back());
      cached.pop_back();
      return block;
    }
    auto offset = pool.take(size);
    if (!offset && pool.reserved() - pool.cached_bytes() + size <= pool.limit) {
      ++pool.stats.num_alloc_retries;
      free_cached(lock, device);
      offset = pool.take(size);
    }
    if (!offset) {
      ++pool.stats.num_ooms;
      const auto allocated = pool.stats.allocated_bytes[0].current;
      TORCH_CHECK_WITH(OutOfMemoryError, false, "late: out of memory. Tried to allocate ", size, " bytes; device ",
                       int(device), " has ", pool.limit, ", of which ", allocated, " are allocated");
    }
    return {mappings().seen + device * kRange + *offset, size, stream, {}};
  }

  // As cudaFree: all of the device's work is waited for before what is cached is given back. Unlocked meanwhile, when
  // nobody else has these blocks.
  void free_cached(std::unique_lock<std::mutex>& lock, c10::DeviceIndex device) {
    auto& pool = pools_[device];
    std::vector<Block> blocks = std::move(pool.dropped);
    pool.dropped.clear();
    for (auto& [_, cached] : pool.cached) blocks.insert(blocks.end(), cached.begin(), cached.end());
    pool.cached.clear();
    if (blocks.empty()) return;
    lock.unlock();
    std::exception_ptr error;
    try {
      for (const Block& block : blocks) {
        for (const auto& [stream, ticket] : block.uses) wait_for(stream, ticket);
      }
      wait_for_device(device);
    } catch (...) {
      error = std::current_exception();  // a failed device runs nothing more
    }
    lock.lock();
    for (const Block& block : blocks) pool.give(block.address - mappings().seen - device * kRange, block.nbytes);
    if (error) std::rethrow_exception(error);
  }

  template <typename Act>
  void for_each_stat(c10::DeviceIndex device, Act act) {
    check_device(device);
    const std::lock_guard lock(mutex_);
    auto& stats = pools_[device].stats;
    for (auto* stat : {&stats.allocation, &stats.segment, &stats.active, &stats.allocated_bytes, &stats.reserved_bytes,
                       &stats.active_bytes, &stats.requested_bytes}) {
      act((*stat)[0]);
    }
  }

  std::mutex mutex_;
  std::array<Pool, kMostDevices> pools_;
};

DeviceMemory& device_memory() {
  static auto* made = new DeviceMemory;
  return *made;
}

void drop_block(void* address) {
  if (address) device_memory().drop(static_cast<char*>(address));
}

// -- Pinned host memory

struct Pinned {
  std::size_t nbytes;
  bool is_registered;  // otherwise the allocator's
  Uses uses;
};

void drop_pinned(void* address);

class HostMemory final : public at::HostAllocator {
 public:
  at::DataPtr allocate(std::size_t nbytes) override {
    if (nbytes == 0) return {nullptr, nullptr, &drop_pinned, c10::Device(c10::kCPU)};
    const std::size_t size = std::max(std::bit_ceil(nbytes), std::size_t(4096));
    char* address = take(size);
    if (!address) {
      void* mapped = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      TORCH_CHECK_WITH(OutOfMemoryError, mapped != MAP_FAILED, "late: no pinned memory of ", size, " bytes");
      address = static_cast<char*>(mapped);
      const std::lock_guard lock(mutex_);
      pinned_[address] = {size, false, {}};
    }
    std::memset(address, kFill, size);
    return {address, address, &drop_pinned, c10::Device(c10::kCPU)};
  }

  void drop(char* address) {
    const std::lock_guard lock(mutex_);
    cached_.push_back(address);
  }

  void add(char* address, std::size_t nbytes) {
    TORCH_CHECK(address && nbytes > 0, "late: no bytes to register");
    TORCH_CHECK(!device_of(address), "late: device memory cannot be registered");
    const std::lock_guard lock(mutex_);
    const auto next = pinned_.lower_bound(address + nbytes);
    const bool overlaps = next != pinned_.begin() && std::prev(next)->first + std::prev(next)->second.nbytes > address;
    TORCH_CHECK(!overlaps, "late: host memory is registered already");
    pinned_[address] = {nbytes, true, {}};
  }

  void remove(char* address) {
    Uses uses;
    {
      const std::lock_guard lock(mutex_);
      const auto found = pinned_.find(address);
      TORCH_CHECK(found != pinned_.end() && found->second.is_registered, "late: host memory is not registered");
      unsigned char resident = 0;  // mincore knows no page that is not mapped
      const auto page = reinterpret_cast<std::uintptr_t>(address) & ~std::uintptr_t(4095);
      TORCH_CHECK(mincore(reinterpret_cast<void*>(page), 1, &resident) == 0,
                  "late: host memory was given back while it was registered");
      uses = std::move(found->second.uses);
      pinned_.erase(found);
    }
    for (const auto& [stream, ticket] : uses) wait_for(stream, ticket);
  }

  std::vector<std::uint64_t> registered() {
    std::vector<std::uint64_t> found;
    const std::lock_guard lock(mutex_);
    for (const auto& [address, pinned] : pinned_) {
      if (pinned.is_registered) found.push_back(reinterpret_cast<std::uint64_t>(address));
    }
    return found;
  }

  // Bytes from an address to the end of the pinned range that it lies in; 0 where it is not pinned.
  std::size_t pinned_bytes(const char* address) {
    const std::lock_guard lock(mutex_);
    const auto found = range_of(address);
    return found == pinned_.end() ? 0 : std::size_t(found->first + found->second.nbytes - address);
  }

  void use(const char* address, const void* context, StreamKey stream, Ticket ticket) {
    const std::lock_guard lock(mutex_);
    const auto found = range_of(address);
    if (found == pinned_.end()) return;
    const bool is_known = found->second.is_registered || context == found->first || address == found->first;
    if (is_known) found->second.uses[stream] = ticket;
  }

  bool record_event(void* address, void* context, c10::Stream stream) override {
    use(static_cast<char*>(address), context, key(stream), last_ticket(key(stream)));
    return true;
  }

  void empty_cache() override {
    const std::lock_guard lock(mutex_);
    std::erase_if(cached_, [&](char* address) {
      const auto found = pinned_.find(address);
      if (!are_over(found->second.uses)) return false;
      munmap(address, found->second.nbytes);
      pinned_.erase(found);
      return true;
    });
  }

  at::DeleterFnPtr raw_deleter() const override { return &drop_pinned; }
  void copy_data(void* target, const void* source, std::size_t nbytes) const override {
    std::memcpy(target, source, nbytes);
  }
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}

 private:
  // The newest cached block of that size that no task uses.
  char* take(std::size_t size) {
    const std::lock_guard lock(mutex_);
    for (auto cached = cached_.rbegin(); cached != cached_.rend(); ++cached) {
      auto& block = pinned_.at(*cached);
      if (block.nbytes != size || !are_over(block.uses)) continue;
      char* address = *cached;
      block.uses.clear();
      cached_.erase(std::next(cached).base());
      return address;
    }
    return nullptr;
  }

  std::map<char*, Pinned>::iterator range_of(const char* address) {
    auto found = pinned_.upper_bound(const_cast<char*>(address));
    if (found == pinned_.begin()) return pinned_.end();
    --found;
    return address < found->first + found->second.nbytes ? found : pinned_.end();
  }

  std::mutex mutex_;
  std::map<char*, Pinned> pinned_;  // by first address
  std::vector<char*> cached_;       // blocks that were dropped, newest last
};

HostMemory& host_memory() {
  static auto* made = new HostMemory;
  return *made;
}

void drop_pinned(void* address) {
  if (address) host_memory().drop(static_cast<char*>(address));
}

}  // namespace

c10::DeviceAllocator& device_allocator() { return device_memory(); }

void set_device_bytes(c10::DeviceIndex device, std::size_t nbytes) { device_memory().set_limit(device, nbytes); }

std::optional<c10::DeviceIndex> device_of(const void* address) {
  const auto offset = static_cast<const char*>(address) - mappings().seen;
  if (!address || offset < 0 || std::size_t(offset) >= kRange * kMostDevices) return std::nullopt;
  return c10::DeviceIndex(std::size_t(offset) / kRange);
}

void* real(const void* address) {
  if (!device_of(address)) return const_cast<void*>(address);
  return mappings().real + (static_cast<const char*>(address) - mappings().seen);
}

at::HostAllocator& host_allocator() { return host_memory(); }

void pin(void* address, std::size_t nbytes) { host_memory().add(static_cast<char*>(address), nbytes); }

void unpin(void* address) { host_memory().remove(static_cast<char*>(address)); }

std::vector<std::uint64_t> registered() { return host_memory().registered(); }

bool is_pinned(const void* address) { return host_memory().pinned_bytes(static_cast<const char*>(address)) > 0; }

bool is_pinned(const void* address, std::size_t nbytes) {
  const auto pinned = host_memory().pinned_bytes(static_cast<const char*>(address));
  TORCH_CHECK(pinned == 0 || pinned >= nbytes, "late: a copy's host memory is registered in part");
  return pinned > 0;
}

void use_pinned(const void* address, const void* context, StreamKey stream, Ticket ticket) {
  host_memory().use(static_cast<const char*>(address), context, stream, ticket);
}

}  // namespace late
