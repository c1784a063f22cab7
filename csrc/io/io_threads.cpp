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
#include <limits>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace offload {
namespace {

// What a transfer came to; see Completion.
struct Outcome {
  std::int32_t error = 0;
  std::uint64_t detail = 0;
};

struct FreeDeleter {
  void operator()(void* memory) const { std::free(memory); }
};
using HeaderBuffer = std::unique_ptr<SlotHeader, FreeDeleter>;

// Memory for one header, aligned for O_DIRECT; throws std::bad_alloc.
HeaderBuffer make_header_buffer() {
  void* memory = std::aligned_alloc(kSectorBytes, sizeof(SlotHeader));
  if (memory == nullptr) throw std::bad_alloc();
  return HeaderBuffer(static_cast<SlotHeader*>(memory));
}

// What is still to be moved between one range of a file and at most two pieces of memory, one after the other: the
// header and a piece of the payload, or such a piece alone.
class Span {
 public:
  Span(void* first, std::size_t first_bytes, void* second, std::size_t second_bytes, std::uint64_t offset)
      : parts_{{first, first_bytes}, {second, second_bytes}}, offset_(offset) {}

  bool done() const { return parts_[0].iov_len + parts_[1].iov_len == 0; }
  std::uint64_t offset() const { return offset_; }

  // The memory of one system call that moves at most limit_bytes; returns how many parts it has.
  int call(std::size_t limit_bytes, iovec call[2]) const {
    int count = 0;
    for (const iovec& part : parts_) {
      const std::size_t length = std::min(part.iov_len, limit_bytes);
      if (length == 0) continue;
      call[count++] = {part.iov_base, length};
      limit_bytes -= length;
    }
    return count;
  }

  // Note that a system call has moved so many bytes. Returns 0, or an error where that was too little to go on:
  // nothing, or with O_DIRECT less than a sector, as a read at the end of the file.
  std::int32_t advance(std::size_t moved, IoKind kind, bool direct) {
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

 private:
  iovec parts_[2];
  std::uint64_t offset_;
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
std::uint64_t slot_end(const IoRequest& request) {
  return request.offset + sizeof(SlotHeader) + request.identity.nbytes;
}

// What one system call is to do, because of a fault that a test has injected: fail at once with error, or move
// limit_bytes at most. Without a fault, nothing is planned: no error, and no limit.
struct PlannedCall {
  int error = 0;
  std::size_t limit_bytes = std::numeric_limits<std::size_t>::max();
};
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

// One direction: its requests, and which of them is on each thread. Syncs are among the writes.
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
  std::vector<HeaderBuffer> headers;  // one for each thread
  std::vector<std::thread> threads;
};

void check_depth(std::size_t depth) {
  if (depth < 1 || depth > kMostDepth)
    throw std::invalid_argument("depth must be from 1 to " + std::to_string(kMostDepth));
}

// Blocks all signals in threads that are started while this lives: they go to Python's main thread.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  sigset_t before_;
};

}  // namespace

struct IoThreads::State {
  State(CompletionQueue& queue_, std::size_t piece_bytes_) : queue(queue_), piece_bytes(piece_bytes_) {}

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
        return {errno, span.offset()};
      }
      const std::int32_t error = span.advance(static_cast<std::size_t>(moved), kind, file.direct());
      if (error != 0) return {error, span.offset()};
    }
    return {};
  }

  // Read a slot piece by piece. The first piece brings the header, which is judged before the payload is looked at:
  // it says whether there is a checksum to compare.
  Outcome read(const IoRequest& request, SlotHeader* header) {
    const Pieces pieces(request, piece_bytes);
    std::optional<PayloadSum> sum;
    for (std::size_t i = 0; i < pieces.count(); ++i) {
      const Outcome outcome = move(IoKind::kRead, *request.file, pieces.span(i, header));
      if (outcome.error != 0) return outcome;
      if (i == 0) {
        const std::int32_t error = admit(*header, request.identity, request.terms);
        if (error != 0) return {error, request.offset};
        sum.emplace(request.terms, *header);
      }
      sum->pass(pieces.payload(i), pieces.payload_bytes(i));
    }
    if (!sum->fits(*header)) return {kErrorChecksum, request.offset};
    return {0, sum->value()};
  }

  // Write a slot. The first piece goes last, in one system call with the header, which has the payload's checksum. So
  // a slot has its header only when all other pieces are there, and no call is spent on the header alone. The
  // checksum still passes the pieces in their order.
  Outcome write(const IoRequest& request, SlotHeader* header) {
    int error = planned_call(faults, IoKind::kAllocate, false).error;
    if (error == 0) error = request.file->reserve(slot_end(request));
    if (error != 0) return {error, request.offset};

    const Pieces pieces(request, piece_bytes);
    PayloadSum sum(request.terms);
    sum.pass(pieces.payload(0), pieces.payload_bytes(0));
    for (std::size_t i = 1; i < pieces.count(); ++i) {
      sum.pass(pieces.payload(i), pieces.payload_bytes(i));
      const Outcome outcome = move(IoKind::kWrite, *request.file, pieces.span(i, header));
      if (outcome.error != 0) return outcome;
    }
    make_header(request.identity, request.terms.verify, sum.value(), header);
    const Outcome outcome = move(IoKind::kWrite, *request.file, pieces.span(0, header));
    return outcome.error == 0 ? Outcome{0, sum.value()} : outcome;
  }

  Outcome sync(const IoRequest& request) {
    return {request.file->sync(planned_call(faults, IoKind::kSync, false).error), 0};
  }

  // What a lane's thread number `index` does: take requests and do them, until the lane is closing and none is left.
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
        // Until no thread has an older request. All of these have been taken, as requests are taken in order.
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
      completion.detail = outcome.detail;
      completion.finished_s = monotonic_seconds();
      item.request.file.reset();  // whoever sees the completion finds the file released by this request
      // Before the thread is marked idle, for which a sync waits: so a sync completes after the writes it covers.
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

  // Replace the threads by others, as many in each lane as there may be requests in flight. Nothing may be in flight
  // meanwhile (`set_depth`).
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
  FaultList faults;
  Lane reads;
  Lane writes;
};

IoThreads::IoThreads(CompletionQueue& queue, std::size_t depth, std::size_t piece_bytes) : owner_(getpid()) {
  check_depth(depth);
  if (piece_bytes == 0 || piece_bytes % kSectorBytes != 0 || piece_bytes > (std::size_t{1} << 30))
    throw std::invalid_argument("piece_bytes must be a multiple of 4096, at most 1 GiB");
  state_ = std::make_unique<State>(queue, piece_bytes);
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
