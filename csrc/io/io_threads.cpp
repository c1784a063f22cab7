#include "io_threads.h"

#include <pthread.h>
#include <signal.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <mutex>
#include <new>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "crc32c.h"

namespace offload {
namespace {

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

HeaderBuffer make_header_buffer() {
  void* memory = std::aligned_alloc(kSectorBytes, sizeof(SlotHeader));
  if (memory == nullptr) throw std::bad_alloc();
  return HeaderBuffer(static_cast<SlotHeader*>(memory));
}

// One direction: its requests, and which of them is on each thread.
struct Lane {
  struct Item {
    std::uint64_t sequence;
    IoRequest request;
  };
  static constexpr std::uint64_t kIdle = ~std::uint64_t{0};

  std::mutex mutex;
  std::condition_variable arrived;   // an item, or closing
  std::condition_variable finished;  // a thread became idle; syncs wait here
  std::deque<Item> waiting;
  std::vector<std::uint64_t> active;  // by thread: sequence of its item, or kIdle
  std::uint64_t next_sequence = 0;
  bool closing = false;
  std::vector<HeaderBuffer> headers;
  std::vector<std::thread> threads;
};

}  // namespace

struct IoThreads::State {
  State(CompletionQueue& queue_, std::size_t piece_bytes_, bool checksum_)
      : queue(queue_), piece_bytes(piece_bytes_), checksum(checksum_) {}

  // Move all bytes of one or two buffers from or to offset; continues short transfers.
  Outcome move(IoKind kind, const StoreFile& file, iovec first, iovec second, std::uint64_t offset) {
    iovec parts[2] = {first, second};
    while (true) {
      const std::size_t left = parts[0].iov_len + parts[1].iov_len;
      if (left == 0) return {};
      std::size_t limit = left;
      ssize_t moved = 0;
      FaultList::Fault fault;
      if (faults.due(kind, &fault)) {
        if (fault.error > 0) {
          moved = -1;
          errno = fault.error;
        } else {
          limit = std::min(limit, fault.limit_bytes);
          if (file.direct()) limit = (limit + kSectorBytes - 1) / kSectorBytes * kSectorBytes;
        }
      }
      if (moved == 0) {
        iovec call[2] = {parts[0], parts[1]};
        call[0].iov_len = std::min(parts[0].iov_len, limit);
        call[1].iov_len = std::min(parts[1].iov_len, limit - call[0].iov_len);
        const int skip = call[0].iov_len == 0 ? 1 : 0;
        const int count = call[1].iov_len == 0 ? 1 - skip : 2 - skip;
        const auto at = static_cast<off_t>(offset);
        moved = kind == IoKind::kRead ? preadv(file.fd(), call + skip, count, at)
                                      : pwritev(file.fd(), call + skip, count, at);
      }
      if (moved < 0) {
        if (errno == EINTR) continue;
        return {errno, 0, offset};
      }
      // O_DIRECT goes on at sector boundaries only. What is left of a sector is either the end
      // of a file that was cut, or will be moved again.
      std::size_t whole = static_cast<std::size_t>(moved);
      if (file.direct()) whole -= whole % kSectorBytes;
      if (whole == 0) return {kind == IoKind::kRead ? kErrorShort : EIO, 0, offset};
      offset += whole;
      for (iovec& part : parts) {
        const std::size_t used = std::min(part.iov_len, whole);
        part.iov_base = static_cast<char*>(part.iov_base) + used;
        part.iov_len -= used;
        whole -= used;
      }
    }
  }

  Outcome read(const IoRequest& request, SlotHeader* header) {
    auto* payload = static_cast<char*>(request.address);
    const std::uint64_t nbytes = request.identity.nbytes;
    std::uint64_t at = request.offset;
    std::uint64_t done = 0;
    std::uint32_t crc = 0;
    bool verify = false;
    do {
      const std::size_t piece = std::min<std::uint64_t>(piece_bytes, nbytes - done);
      const std::size_t header_bytes = done == 0 ? sizeof *header : 0;
      Outcome outcome = move(IoKind::kRead, *request.file, {header, header_bytes}, {payload + done, piece}, at);
      if (outcome.error != 0) return outcome;
      if (done == 0) {
        if (check_header(*header, request.identity) != 0) return {kErrorHeader, 0, request.offset};
        if (request.has_expected_crc && request.expected_crc != header->payload_crc)
          return {kErrorChecksum, 0, request.offset};
        verify = checksum && (header->flags & kSlotHasChecksum) != 0;
      }
      if (verify) crc = crc32c(crc, payload + done, piece);
      at += header_bytes + piece;
      done += piece;
    } while (done < nbytes);
    if (verify && crc != header->payload_crc) return {kErrorChecksum, crc, request.offset};
    return {0, crc, 0};
  }

  // The first piece goes last, in one request with the header, which by then knows the
  // checksum: a slot has its header only when all other pieces are there, and no request is
  // spent on the header alone.
  Outcome write(const IoRequest& request, SlotHeader* header) {
    const auto* payload = static_cast<const char*>(request.address);
    const std::uint64_t nbytes = request.identity.nbytes;
    const std::uint64_t payload_offset = request.offset + sizeof *header;
    FaultList::Fault fault;
    int error = faults.due(IoKind::kAllocate, &fault) ? fault.error : 0;
    if (error == 0) error = request.file->reserve(payload_offset + nbytes);
    if (error != 0) return {error, 0, request.offset};

    const std::size_t first = std::min<std::uint64_t>(piece_bytes, nbytes);
    std::uint32_t crc = checksum ? crc32c(0, payload, first) : 0;
    for (std::uint64_t done = first; done < nbytes;) {
      const std::size_t piece = std::min<std::uint64_t>(piece_bytes, nbytes - done);
      if (checksum) crc = crc32c(crc, payload + done, piece);
      Outcome outcome =
          move(IoKind::kWrite, *request.file, {nullptr, 0}, {const_cast<char*>(payload) + done, piece}, payload_offset + done);
      if (outcome.error != 0) return outcome;
      done += piece;
    }
    make_header(request.identity, checksum, crc, header);
    Outcome outcome = move(IoKind::kWrite, *request.file, {header, sizeof *header},
                           {const_cast<char*>(payload), first}, request.offset);
    outcome.checksum = outcome.error == 0 ? crc : 0;
    return outcome;
  }

  Outcome sync(const IoRequest& request) {
    FaultList::Fault fault;
    const int injected = faults.due(IoKind::kSync, &fault) ? fault.error : 0;
    return {request.file->sync(injected), 0, 0};
  }

  void run(Lane& lane, std::size_t index) {
    SlotHeader* header = lane.headers[index].get();
    std::unique_lock<std::mutex> lock(lane.mutex);
    while (true) {
      lane.arrived.wait(lock, [&] { return !lane.waiting.empty() || lane.closing; });
      if (lane.waiting.empty()) return;
      Lane::Item item = std::move(lane.waiting.front());
      lane.waiting.pop_front();
      lane.active[index] = item.sequence;
      if (item.request.kind == IoKind::kSync) {
        lane.finished.wait(lock, [&] {
          return *std::min_element(lane.active.begin(), lane.active.end()) >= item.sequence;
        });
      }
      lock.unlock();
      Completion completion;
      completion.op = item.request.op;
      completion.started_s = monotonic_seconds();
      Outcome outcome;
      if (item.request.kind == IoKind::kRead) {
        outcome = read(item.request, header);
      } else if (item.request.kind == IoKind::kWrite) {
        outcome = write(item.request, header);
      } else {
        outcome = sync(item.request);
      }
      completion.error = outcome.error;
      completion.checksum = outcome.checksum;
      completion.detail = outcome.offset;
      completion.finished_s = monotonic_seconds();
      item.request.file.reset();
      item.request.turn.reset();
      // Before a sync may start: its completion comes after those of the writes it covers.
      queue.push(completion);
      lock.lock();
      lane.active[index] = Lane::kIdle;
      lane.finished.notify_all();
    }
  }

  void start(Lane& lane, std::size_t threads, const char* name) {
    lane.active.assign(threads, Lane::kIdle);
    for (std::size_t i = 0; i < threads; ++i) lane.headers.push_back(make_header_buffer());
    for (std::size_t i = 0; i < threads; ++i) {
      lane.threads.emplace_back([this, &lane, i] { run(lane, i); });
      const std::string label = std::string("offload-") + name + std::to_string(i % 100);
      pthread_setname_np(lane.threads.back().native_handle(), label.c_str());
    }
  }

  void stop(Lane& lane) {
    {
      std::lock_guard<std::mutex> lock(lane.mutex);
      lane.closing = true;
    }
    lane.arrived.notify_all();
    for (auto& thread : lane.threads) thread.join();
    lane.threads.clear();
  }

  CompletionQueue& queue;
  const std::size_t piece_bytes;
  const bool checksum;
  FaultList faults;
  Lane reads;
  Lane writes;
};

IoThreads::IoThreads(CompletionQueue& queue, std::size_t threads, std::size_t piece_bytes, bool checksum)
    : owner_(getpid()) {
  if (threads < 1) throw std::invalid_argument("threads must be at least 1");
  if (piece_bytes == 0 || piece_bytes % kSectorBytes != 0 || piece_bytes > (std::size_t{1} << 30))
    throw std::invalid_argument("piece_bytes must be a multiple of 4096, at most 1 GiB");
  state_ = std::make_unique<State>(queue, piece_bytes, checksum);
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    state_->start(state_->reads, threads, "read");
    state_->start(state_->writes, threads, "write");
  } catch (...) {
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    close();
    throw;
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

IoThreads::~IoThreads() {
  close();
  // In a forked child neither the threads nor the state of the locks exist: leave them be.
  if (getpid() != owner_) (void)state_.release();
}

void IoThreads::submit(IoRequest request) {
  if (getpid() != owner_) throw std::runtime_error("I/O threads belong to the process that made them");
  Lane& lane = request.kind == IoKind::kRead ? state_->reads : state_->writes;
  {
    std::lock_guard<std::mutex> lock(lane.mutex);
    if (lane.closing) throw std::runtime_error("I/O threads are closed");
    lane.waiting.push_back({lane.next_sequence++, std::move(request)});
  }
  lane.arrived.notify_one();
}

void IoThreads::close() {
  if (getpid() != owner_) return;
  state_->stop(state_->reads);
  state_->stop(state_->writes);
}

void IoThreads::inject(const FaultList::Fault& fault) { state_->faults.add(fault); }

}  // namespace offload
