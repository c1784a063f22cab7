#include "io_uring.h"

#include <pthread.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <deque>
#include <list>
#include <mutex>
#include <stdexcept>
#include <system_error>
#include <thread>
#include <utility>

#include "crc32c.h"
#include "ring.h"
#include "transfer.h"

namespace offload {
namespace {

// Checksums are taken in parts of this size: a tenth of a millisecond or less each.
constexpr std::size_t kCheckBytes = std::size_t{1} << 20;
constexpr std::size_t kNone = ~std::size_t{0};

// One request under way.
struct Transfer {
  Transfer(IoRequest request_, std::size_t piece_bytes, std::uint64_t sequence_)
      : request(std::move(request_)),
        pieces(request, piece_bytes),
        count(pieces.count()),
        sequence(sequence_),
        next(request.kind == IoKind::kWrite ? 1 : 0) {
    completion.op = request.op;
    completion.started_s = monotonic_seconds();
  }

  void fail(std::size_t piece, const Outcome& outcome) {
    // The earliest piece speaks for all, as if they had been moved one after the other.
    if (piece >= failed_piece) return;
    failed_piece = piece;
    failure = outcome;
  }
  bool failed() const { return failed_piece != kNone; }

  IoRequest request;
  Pieces pieces;
  std::size_t count;
  std::uint64_t sequence;
  Completion completion;
  HeaderBuffer header;
  std::size_t next;           // piece to be moved next; a write's piece 0 comes after all others
  bool headed = false;        // write: piece 0 is under way or done
  std::size_t in_flight = 0;  // pieces with the kernel
  std::size_t unchecked = 0;  // pieces whose checksum is still to be taken
  std::vector<std::uint32_t> crcs;
  std::size_t failed_piece = kNone;
  Outcome failure;
};

struct Direction {
  std::deque<IoRequest> waiting;
  std::list<Transfer> active;
  std::size_t flights = 0;
};

// One request to the kernel.
struct Flight {
  enum class Kind { kFree, kPiece, kGrowth, kSync, kWake };
  Kind kind = Kind::kFree;
  Direction* direction = nullptr;
  std::list<Transfer>::iterator transfer;
  std::size_t piece = 0;
  Span span;
  iovec call[2] = {};
};

// Part of a payload whose checksum is to be taken.
struct Check {
  std::list<Transfer>::iterator transfer;
  std::size_t piece;
  std::size_t done;
};

}  // namespace

// A ring, its thread, and what is on it. All public methods are for other threads, all else belongs
// to its own.
class IoUring::Worker {
 public:
  Worker(CompletionQueue& queue, std::size_t depth, std::size_t piece_bytes, bool checksum)
      : queue_(queue),
        depth_(depth),
        piece_bytes_(piece_bytes),
        checksum_(checksum),
        // Both directions, a growth, a sync and the wake-up.
        flights_(2 * kMostDepth + 3),
        ring_(static_cast<unsigned>(flights_.size())) {
    wake_fd_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (wake_fd_ < 0) throw std::system_error(errno, std::generic_category(), "eventfd");
    try {
      const SignalsBlocked blocked;
      thread_ = std::thread([this] { run(); });
    } catch (...) {
      ::close(wake_fd_);
      throw;
    }
    pthread_setname_np(thread_.native_handle(), "offload-ring");
  }

  ~Worker() {
    stop();
    ::close(wake_fd_);
  }

  void submit(IoRequest request) {
    bool wake = false;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (closing_) throw std::runtime_error("the I/O ring is closed");
      // While anything is there the thread has been woken and has not looked yet.
      wake = inbox_.empty();
      inbox_.push_back(std::move(request));
    }
    if (wake) this->wake();
  }

  void set_depth(std::size_t depth) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (closing_) throw std::runtime_error("the I/O ring is closed");
    depth_ = depth;
  }

  void inject(const FaultList::Fault& fault) { faults_.add(fault); }

  void stop() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      closing_ = true;
    }
    wake();
    if (!thread_.joinable()) return;
    thread_.join();
  }

 private:
  void wake() {
    const std::uint64_t one = 1;
    // Fails only where the thread has been woken 2^64 times without looking.
    (void)!write(wake_fd_, &one, sizeof one);
  }

  void run() {
    for (Flight& flight : flights_) free_.push_back(&flight);
    while (true) {
      const bool closing = take_inbox();
      fill(reads_);
      fill(writes_);
      const bool idle = reads_.waiting.empty() && reads_.active.empty() && writes_.waiting.empty() &&
                        writes_.active.empty() && syncs_.empty();
      if (closing && idle) return;
      if (!wake_armed_) arm_wake();
      const bool busy = !answers_.empty() || !checks_.empty();
      if (!busy || !prepared_.empty()) enter(!busy);
      RingResult result{};
      while (ring_.take(&result)) land(reinterpret_cast<Flight*>(result.token), result.result);
      while (!answers_.empty()) {
        const auto [flight, answer] = answers_.front();
        answers_.pop_front();
        land(flight, answer);
      }
      check_some();
    }
  }

  bool take_inbox() {
    std::deque<IoRequest> arrived;
    bool closing = false;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      arrived.swap(inbox_);
      closing = closing_;
    }
    for (IoRequest& request : arrived)
      (request.kind == IoKind::kRead ? reads_ : writes_).waiting.push_back(std::move(request));
    return closing;
  }

  // Start what may start.
  void fill(Direction& direction) {
    for (auto transfer = direction.active.begin(); transfer != direction.active.end(); ++transfer) {
      if (!issue_pieces(direction, transfer)) return;
    }
    while (!direction.waiting.empty() && !(growing_ && &direction == &writes_)) {
      IoRequest& request = direction.waiting.front();
      if (request.kind == IoKind::kSync) {
        syncs_.push_back({std::move(request), next_sequence_++, monotonic_seconds()});
        direction.waiting.pop_front();
        continue;
      }
      // Tiles whose checksum is still to be taken have no pieces with the kernel, but are bounded too.
      if (direction.flights >= depth_ || direction.active.size() >= 2 * depth_) break;
      auto transfer =
          direction.active.emplace(direction.active.end(), std::move(request), piece_bytes_, next_sequence_++);
      direction.waiting.pop_front();
      transfer->header = take_header();
      if (takes_checksum(*transfer)) transfer->crcs.resize(transfer->count);
      if (transfer->request.kind == IoKind::kWrite) {
        reserve(transfer);
      } else if (!issue_pieces(direction, transfer)) {
        break;
      }
    }
    if (&direction == &writes_) start_sync();
  }

  // Move on with a transfer; false where the direction has no room for more.
  bool issue_pieces(Direction& direction, std::list<Transfer>::iterator transfer) {
    Transfer& t = *transfer;
    if (&direction == &writes_ && growing_ && growing_transfer_ == transfer) return true;
    while (!t.failed() && t.next < t.count) {
      if (direction.flights >= depth_) return false;
      issue_piece(direction, transfer, t.next++);
    }
    if (t.request.kind == IoKind::kWrite && !t.failed() && !t.headed && t.in_flight == 0 && t.unchecked == 0) {
      if (direction.flights >= depth_) return false;
      std::uint32_t crc = 0;
      if (checksum_) crc = takes_checksum(t) ? combined(t) : t.request.expected_crc;
      t.completion.checksum = crc;
      make_header(t.request.identity, checksum_, crc, t.header.get());
      t.headed = true;
      issue_piece(direction, transfer, 0);
    }
    return true;
  }

  void issue_piece(Direction& direction, std::list<Transfer>::iterator transfer, std::size_t piece) {
    Flight* flight = new_flight(Flight::Kind::kPiece);
    flight->direction = &direction;
    flight->transfer = transfer;
    flight->piece = piece;
    flight->span = transfer->pieces.span(piece, transfer->header.get());
    ++transfer->in_flight;
    ++direction.flights;
    prepare(flight);
  }

  // Everything that goes to the kernel goes through here, also for a second time.
  void prepare(Flight* flight) {
    const auto token = reinterpret_cast<std::uintptr_t>(flight);
    if (flight->kind == Flight::Kind::kWake) {
      ring_.poll_readable(wake_fd_, token);
    } else if (flight->kind == Flight::Kind::kSync) {
      const PlannedCall planned = planned_call(faults_, IoKind::kSync, false);
      if (planned.error != 0) return answer(flight, -planned.error);
      ring_.datasync(syncs_.front().request.file->fd(), token);
    } else if (flight->kind == Flight::Kind::kGrowth) {
      ring_.allocate(growing_transfer_->request.file->fd(), growth_.offset, growth_.nbytes, token);
    } else {
      const IoRequest& request = flight->transfer->request;
      const PlannedCall planned = planned_call(faults_, request.kind, request.file->direct());
      if (planned.error != 0) return answer(flight, -planned.error);
      const int count = flight->span.call(planned.limit_bytes, flight->call);
      if (count == 0) return answer(flight, 0);
      const bool write = request.kind == IoKind::kWrite;
      ring_.transfer(write, request.file->fd(), flight->call, count, flight->span.offset(), token);
    }
    prepared_.push_back(flight);
  }

  // An answer that does not come from the kernel; seen after those that do.
  void answer(Flight* flight, int result) { answers_.push_back({flight, result}); }

  void enter(bool wait) {
    unsigned submitted = 0;
    const int error = ring_.enter(wait, &submitted);
    prepared_.erase(prepared_.begin(), prepared_.begin() + submitted);
    if (error == 0 || error == EINTR) return;
    if (error != EAGAIN && error != EBUSY) {
      // Never seen, but nobody may wait for ever: what the kernel has not taken ends here.
      ring_.discard();
      for (Flight* flight : prepared_) answer(flight, -error);
      prepared_.clear();
    }
    // Out of some resource that comes back by itself.
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }

  void land(Flight* flight, int result) {
    if (result == -EINTR || result == -EAGAIN) return prepare(flight);
    const Flight::Kind kind = flight->kind;
    if (kind == Flight::Kind::kPiece) return land_piece(flight, result);
    free(flight);
    if (kind == Flight::Kind::kGrowth) {
      growth_ = growing_transfer_->request.file->finish_growth(slot_end(growing_transfer_->request), growth_,
                                                               result < 0 ? -result : 0);
      go_on_growing();
    } else if (kind == Flight::Kind::kSync) {
      finish_sync(result < 0 ? -result : 0);
    } else {
      wake_armed_ = false;
      std::uint64_t count = 0;
      (void)!read(wake_fd_, &count, sizeof count);
    }
  }

  void land_piece(Flight* flight, int result) {
    Direction& direction = *flight->direction;
    const auto transfer = flight->transfer;
    Transfer& t = *transfer;
    const std::uint64_t offset = flight->span.offset();
    std::int32_t error = result < 0 ? -result : 0;
    if (error == 0)
      error = flight->span.advance(static_cast<std::size_t>(result), t.request.kind, t.request.file->direct());
    if (error == 0 && !flight->span.done() && !t.failed()) return prepare(flight);
    const std::size_t piece = flight->piece;
    free(flight);
    --direction.flights;
    --t.in_flight;
    if (error != 0) {
      t.fail(piece, {error, 0, offset});
    } else if (t.request.kind == IoKind::kRead) {
      if (piece == 0) {
        const std::int32_t refused = admit(*t.header, t.request);
        if (refused != 0) t.fail(0, {refused, 0, t.request.offset});
      }
      if (takes_checksum(t) && !t.failed()) add_check(transfer, piece);
    }
    finish_if_done(direction, transfer);
  }

  void finish_if_done(Direction& direction, std::list<Transfer>::iterator transfer) {
    Transfer& t = *transfer;
    const bool moved = t.next >= t.count && (t.request.kind == IoKind::kRead || t.headed);
    if (t.in_flight != 0 || t.unchecked != 0 || !(moved || t.failed())) return;
    Completion& completion = t.completion;
    if (t.failed()) {
      completion.error = t.failure.error;
      completion.detail = t.failure.offset;
      completion.checksum = 0;
    } else if (t.request.kind == IoKind::kRead && takes_checksum(t) && (t.header->flags & kSlotHasChecksum) != 0) {
      completion.checksum = combined(t);
      if (completion.checksum != t.header->payload_crc) {
        completion.error = kErrorChecksum;
        completion.detail = t.request.offset;
      }
    }
    headers_.push_back(std::move(t.header));
    const Completion report = finished(completion);
    // The file goes first: whoever hears of the end may rely on nothing being held.
    direction.active.erase(transfer);
    queue_.push(report);
  }

  static Completion finished(Completion completion) {
    completion.finished_s = monotonic_seconds();
    return completion;
  }

  // Growth

  // The file has to have room before anything is written, and allocating may take its time. Other
  // writes that have begun go on meanwhile; new ones wait, for they may need the same growth.
  void reserve(std::list<Transfer>::iterator transfer) {
    growing_ = true;
    growing_transfer_ = transfer;
    const int error = planned_call(faults_, IoKind::kAllocate, false).error;
    growth_ = {error, 0, 0};
    if (error == 0) growth_ = transfer->request.file->begin_growth(slot_end(transfer->request));
    go_on_growing();
  }

  void go_on_growing() {
    if (growth_.nbytes != 0) return prepare(new_flight(Flight::Kind::kGrowth));
    growing_ = false;
    const auto transfer = growing_transfer_;
    if (growth_.error != 0) {
      transfer->fail(0, {growth_.error, 0, transfer->request.offset});
      return finish_if_done(writes_, transfer);
    }
    if (takes_checksum(*transfer)) {
      for (std::size_t piece = 0; piece < transfer->count; ++piece) add_check(transfer, piece);
    }
    issue_pieces(writes_, transfer);
  }

  // Sync

  void start_sync() {
    if (syncing_ || syncs_.empty()) return;
    for (const Transfer& write : writes_.active) {
      if (write.sequence < syncs_.front().sequence) return;
    }
    syncing_ = true;
    prepare(new_flight(Flight::Kind::kSync));
  }

  void finish_sync(int error) {
    syncing_ = false;
    Sync sync = std::move(syncs_.front());
    syncs_.pop_front();
    Completion completion;
    completion.op = sync.request.op;
    completion.error = sync.request.file->note_sync(error);
    completion.started_s = sync.started_s;
    sync.request.file.reset();
    queue_.push(finished(completion));
  }

  // Checksums

  // Whether a payload's checksum is taken here: not where the caller has taken it, or will.
  bool takes_checksum(const Transfer& t) const {
    return checksum_ && (t.request.kind == IoKind::kRead ? t.request.verify : !t.request.has_expected_crc);
  }

  void add_check(std::list<Transfer>::iterator transfer, std::size_t piece) {
    transfer->crcs[piece] = 0;
    ++transfer->unchecked;
    checks_.push_back({transfer, piece, 0});
  }

  void check_some() {
    if (checks_.empty()) return;
    Check& check = checks_.front();
    const auto transfer = check.transfer;
    Transfer& t = *transfer;
    const std::size_t nbytes = t.pieces.payload_bytes(check.piece);
    if (!t.failed()) {
      const std::size_t part = std::min(kCheckBytes, nbytes - check.done);
      t.crcs[check.piece] = crc32c(t.crcs[check.piece], t.pieces.payload(check.piece) + check.done, part);
      check.done += part;
      if (check.done < nbytes) return;
    }
    checks_.pop_front();
    --t.unchecked;
    finish_if_done(t.request.kind == IoKind::kRead ? reads_ : writes_, transfer);
  }

  static std::uint32_t combined(const Transfer& transfer) {
    std::uint32_t crc = transfer.crcs[0];
    for (std::size_t piece = 1; piece < transfer.count; ++piece)
      crc = crc32c_combine(crc, transfer.crcs[piece], transfer.pieces.payload_bytes(piece));
    return crc;
  }

  // Odds and ends

  void arm_wake() {
    wake_armed_ = true;
    prepare(new_flight(Flight::Kind::kWake));
  }

  Flight* new_flight(Flight::Kind kind) {
    Flight* flight = free_.back();
    free_.pop_back();
    flight->kind = kind;
    return flight;
  }

  void free(Flight* flight) {
    flight->kind = Flight::Kind::kFree;
    free_.push_back(flight);
  }

  HeaderBuffer take_header() {
    if (headers_.empty()) return make_header_buffer();
    HeaderBuffer header = std::move(headers_.back());
    headers_.pop_back();
    return header;
  }

  struct Sync {
    IoRequest request;
    std::uint64_t sequence;
    double started_s;
  };

  CompletionQueue& queue_;
  FaultList faults_;
  std::atomic<std::size_t> depth_;
  const std::size_t piece_bytes_;
  const bool checksum_;

  std::mutex mutex_;
  std::deque<IoRequest> inbox_;
  bool closing_ = false;

  std::vector<Flight> flights_;
  std::vector<Flight*> free_;
  std::deque<Flight*> prepared_;  // and not yet taken by the kernel, in order
  std::deque<std::pair<Flight*, int>> answers_;
  Direction reads_;
  Direction writes_;
  std::deque<Sync> syncs_;
  bool syncing_ = false;
  bool growing_ = false;
  std::list<Transfer>::iterator growing_transfer_;
  StoreFile::Growth growth_;
  std::deque<Check> checks_;
  std::vector<HeaderBuffer> headers_;
  std::uint64_t next_sequence_ = 0;
  bool wake_armed_ = false;
  int wake_fd_ = -1;
  Ring ring_;
  std::thread thread_;
};

int IoUring::refusal() noexcept { return Ring::refusal(); }

IoUring::IoUring(CompletionQueue& queue, std::size_t depth, std::size_t piece_bytes, bool checksum) : owner_(getpid()) {
  check_depth(depth);
  if (piece_bytes == 0 || piece_bytes % kSectorBytes != 0 || piece_bytes > (std::size_t{1} << 30))
    throw std::invalid_argument("piece_bytes must be a multiple of 4096, at most 1 GiB");
  worker_ = std::make_unique<Worker>(queue, depth, piece_bytes, checksum);
}

IoUring::~IoUring() {
  close();
  // In a forked child neither the thread nor the ring's memory exists: leave them be.
  if (getpid() != owner_) (void)worker_.release();
}

void IoUring::submit(IoRequest request) {
  if (getpid() != owner_) throw std::runtime_error("the I/O ring belongs to the process that made it");
  worker_->submit(std::move(request));
}

void IoUring::set_depth(std::size_t depth) {
  if (getpid() != owner_) throw std::runtime_error("the I/O ring belongs to the process that made it");
  check_depth(depth);
  worker_->set_depth(depth);
}

void IoUring::inject(const FaultList::Fault& fault) { worker_->inject(fault); }

void IoUring::close() {
  if (getpid() == owner_) worker_->stop();
}

}  // namespace offload
