#include "io_threads.h"

#include <pthread.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "crc32c.h"
#include "transfer.h"

namespace offload {
namespace {

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

  // Move all bytes of a span; continues short transfers.
  Outcome move(IoKind kind, const StoreFile& file, Span span) {
    while (!span.done()) {
      const PlannedCall planned = planned_call(faults, kind, file.direct());
      ssize_t moved = -1;
      if (planned.error != 0) {
        errno = planned.error;
      } else {
        iovec call[2];
        const int count = span.call(planned.limit_bytes, call);
        const auto at = static_cast<off_t>(span.offset());
        moved = kind == IoKind::kRead ? preadv(file.fd(), call, count, at) : pwritev(file.fd(), call, count, at);
      }
      if (moved < 0) {
        if (errno == EINTR) continue;
        return {errno, 0, span.offset()};
      }
      const std::int32_t error = span.advance(static_cast<std::size_t>(moved), kind, file.direct());
      if (error != 0) return {error, 0, span.offset()};
    }
    return {};
  }

  Outcome read(const IoRequest& request, SlotHeader* header) {
    const Pieces pieces(request, piece_bytes);
    std::uint32_t crc = 0;
    bool verify = false;
    for (std::size_t i = 0; i < pieces.count(); ++i) {
      const Outcome outcome = move(IoKind::kRead, *request.file, pieces.span(i, header));
      if (outcome.error != 0) return outcome;
      if (i == 0) {
        const std::int32_t error = admit(*header, request);
        if (error != 0) return {error, 0, request.offset};
        verify = checksum && request.verify && (header->flags & kSlotHasChecksum) != 0;
      }
      if (verify) crc = crc32c(crc, pieces.payload(i), pieces.payload_bytes(i));
    }
    if (verify && crc != header->payload_crc) return {kErrorChecksum, crc, request.offset};
    return {0, crc, 0};
  }

  // The first piece goes last, in one request with the header, which by then knows the
  // checksum: a slot has its header only when all other pieces are there, and no request is
  // spent on the header alone.
  Outcome write(const IoRequest& request, SlotHeader* header) {
    int error = planned_call(faults, IoKind::kAllocate, false).error;
    if (error == 0) error = request.file->reserve(slot_end(request));
    if (error != 0) return {error, 0, request.offset};

    const Pieces pieces(request, piece_bytes);
    const bool takes = checksum && !request.has_expected_crc;
    std::uint32_t crc = checksum && !takes ? request.expected_crc : 0;
    if (takes) crc = crc32c(0, pieces.payload(0), pieces.payload_bytes(0));
    for (std::size_t i = 1; i < pieces.count(); ++i) {
      if (takes) crc = crc32c(crc, pieces.payload(i), pieces.payload_bytes(i));
      const Outcome outcome = move(IoKind::kWrite, *request.file, pieces.span(i, header));
      if (outcome.error != 0) return outcome;
    }
    make_header(request.identity, checksum, crc, header);
    Outcome outcome = move(IoKind::kWrite, *request.file, pieces.span(0, header));
    outcome.checksum = outcome.error == 0 ? crc : 0;
    return outcome;
  }

  Outcome sync(const IoRequest& request) {
    return {request.file->sync(planned_call(faults, IoKind::kSync, false).error), 0, 0};
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
        lane.finished.wait(lock,
                           [&] { return *std::min_element(lane.active.begin(), lane.active.end()) >= item.sequence; });
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

  void start(std::size_t depth) {
    const SignalsBlocked blocked;
    start(reads, depth, "read");
    start(writes, depth, "write");
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

  // As many threads as there may be requests in flight: the others end when they have nothing to do.
  void resize(std::size_t depth) {
    for (Lane* lane : {&reads, &writes}) {
      {
        std::lock_guard<std::mutex> lock(lane->mutex);
        if (lane->closing) throw std::runtime_error("I/O threads are closed");
      }
      stop(*lane);
      lane->headers.clear();
      lane->closing = false;
    }
    start(depth);
  }

  CompletionQueue& queue;
  const std::size_t piece_bytes;
  const bool checksum;
  FaultList faults;
  Lane reads;
  Lane writes;
};

IoThreads::IoThreads(CompletionQueue& queue, std::size_t depth, std::size_t piece_bytes, bool checksum)
    : owner_(getpid()) {
  check_depth(depth);
  if (piece_bytes == 0 || piece_bytes % kSectorBytes != 0 || piece_bytes > (std::size_t{1} << 30))
    throw std::invalid_argument("piece_bytes must be a multiple of 4096, at most 1 GiB");
  state_ = std::make_unique<State>(queue, piece_bytes, checksum);
  try {
    state_->start(depth);
  } catch (...) {
    close();
    throw;
  }
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

void IoThreads::set_depth(std::size_t depth) {
  if (getpid() != owner_) throw std::runtime_error("I/O threads belong to the process that made them");
  check_depth(depth);
  state_->resize(depth);
}

void IoThreads::close() {
  if (getpid() != owner_) return;
  state_->stop(state_->reads);
  state_->stop(state_->writes);
}

void IoThreads::inject(const FaultList::Fault& fault) { state_->faults.add(fault); }

}  // namespace offload
