#include "path_lock.h"

#include <dirent.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <mutex>
#include <stdexcept>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

namespace offload {
namespace {

using Clock = std::chrono::steady_clock;

constexpr off_t kLine = 0;
constexpr off_t kFirstTurn = 1;

// The caller submits the next requests when it has seen the last completions: a turn that ended
// in between would cost a wait for every such round.
constexpr auto kLinger = std::chrono::milliseconds(1);

struct flock range(short type, off_t start, off_t length) {
  struct flock lock{};
  lock.l_type = type;
  lock.l_whence = SEEK_SET;
  lock.l_start = start;
  lock.l_len = length;
  return lock;
}

// F_SETLK or F_SETLKW on one byte; 0 or an errno.
int set_lock(int fd, int command, short type, off_t byte) {
  struct flock lock = range(type, byte, 1);
  while (fcntl(fd, command, &lock) != 0) {
    if (errno != EINTR) return errno;
  }
  return 0;
}

// Whether somebody has a lock in a range, as seen from another file table, and who (0: a process
// of another pid namespace).
bool locked(int fd, off_t start, off_t length, pid_t* holder) {
  struct flock lock = range(F_WRLCK, start, length);
  if (fcntl(fd, F_GETLK, &lock) != 0 || lock.l_type == F_UNLCK) return false;
  *holder = lock.l_pid > 0 ? lock.l_pid : 0;
  return true;
}

// Give the calling thread an empty file table of its own; 0 or an errno.
int leave_file_table() {
#ifndef SYS_close_range
  constexpr long SYS_close_range = 436;
#endif
  constexpr unsigned kUnshare = 1U << 1;
  if (syscall(SYS_close_range, 0U, ~0U, kUnshare) == 0) return 0;
  if (unshare(CLONE_FILES) != 0) return errno;
  // A copy that stayed open would keep other people's pipes and sockets from ending.
  DIR* folder = opendir("/proc/thread-self/fd");
  if (folder == nullptr) return errno;
  std::vector<int> open;
  while (const dirent* entry = readdir(folder)) {
    const int fd = std::atoi(entry->d_name);
    if (entry->d_name[0] != '.' && fd != dirfd(folder)) open.push_back(fd);
  }
  closedir(folder);
  for (const int fd : open) ::close(fd);
  return 0;
}

// Line up and take a turn; 0 or an errno. Several turns: the kernel cannot wait for any of
// them, so wait for the one that was given out longest ago; the file's only content is the
// number of the last one, which belongs to whoever holds the line.
int take_turn(int fd, std::uint32_t holders, off_t* turn) {
  int error = set_lock(fd, F_SETLKW, F_WRLCK, kLine);
  if (error != 0) return error;
  std::uint32_t last = 0;
  if (holders > 1 && pread(fd, &last, sizeof last, 0) != sizeof last) last = 0;
  bool taken = false;
  for (std::uint32_t i = 1; i <= holders && !taken && holders > 1; ++i) {
    *turn = kFirstTurn + (last + i) % holders;
    taken = set_lock(fd, F_SETLK, F_WRLCK, *turn) == 0;
  }
  if (!taken) {
    *turn = kFirstTurn + (last + 1) % holders;
    error = set_lock(fd, F_SETLKW, F_WRLCK, *turn);
  }
  if (holders > 1 && error == 0) {
    last = static_cast<std::uint32_t>(*turn - kFirstTurn);
    // Only a guess at who will be through first: nothing is lost with it.
    if (pwrite(fd, &last, sizeof last, 0) < 0) last = 0;
  }
  set_lock(fd, F_SETLK, F_UNLCK, kLine);
  return error;
}

}  // namespace

struct TakingTurns::State : std::enable_shared_from_this<TakingTurns::State> {
  enum class Phase { kStarting, kOut, kAsking, kIn, kEnded };

  State(IoEngine& inner_, CompletionQueue& queue_, Settings settings_)
      : inner(inner_), queue(queue_), settings(std::move(settings_)) {}

  ~State() {
    if (probe >= 0) ::close(probe);
  }

  // All below with the mutex held, unless said otherwise.

  bool room() const {
    if (phase != Phase::kIn || yielding || waiting_requests.empty()) return false;
    const std::uint64_t next = waiting_requests.front().identity.nbytes;
    return in_flight == 0 || in_flight_bytes + next <= settings.turn_bytes;
  }

  // Pass on what may go. The mutex is not held during the inner engine's submit, which may
  // take locks under which it drops other requests' turns; `passing` keeps the order.
  void pass_on(std::unique_lock<std::mutex>& lock) {
    if (passing) return;
    passing = true;
    while (room()) {
      if (turn_bytes >= settings.turn_bytes) {
        pid_t holder = 0;
        if (locked(probe, kLine, 1, &holder)) {
          yielding = true;
          if (in_flight == 0) turn_changed.notify_one();
          break;
        }
        turn_bytes = 0;
      }
      IoRequest request = std::move(waiting_requests.front());
      waiting_requests.pop_front();
      const std::uint64_t nbytes = request.identity.nbytes;
      const std::uint64_t op = request.op;
      ++in_flight;
      in_flight_bytes += nbytes;
      turn_bytes += nbytes + kSectorBytes;  // a turn of syncs ends too
      if (lingering) turn_changed.notify_one();
      lock.unlock();
      try {
        request.turn = std::shared_ptr<void>(static_cast<void*>(this),
                                             [self = shared_from_this(), nbytes](void*) { self->ended(nbytes); });
        inner.submit(std::move(request));
      } catch (const std::exception&) {
        fail(op, ECANCELED);
      }
      lock.lock();
    }
    passing = false;
  }

  // A request has left the inner engine. Any thread, without the mutex.
  void ended(std::uint64_t nbytes) {
    std::lock_guard<std::mutex> lock(mutex);
    --in_flight;
    in_flight_bytes -= nbytes;
    if (in_flight == 0) {
      turn_changed.notify_one();
      if (closing) closer_changed.notify_all();
    }
    if (!waiting_requests.empty()) room_changed.notify_one();
  }

  void fail(std::uint64_t op, int error) {
    Completion completion;
    completion.op = op;
    completion.error = error;
    completion.started_s = completion.finished_s = monotonic_seconds();
    queue.push(completion);
  }

  void fail_waiting(int error) {
    for (const IoRequest& request : waiting_requests) fail(request.op, error);
    waiting_requests.clear();
  }

  void set_phase(Phase next) {
    phase = next;
    if (next == Phase::kAsking) {
      asked = Clock::now();
      reports = 0;
      if (watch_idle) watch_changed.notify_one();
    }
    if (closing || next == Phase::kEnded) closer_changed.notify_all();
  }

  // The thread that holds the lock. Nothing in it may use a descriptor of the process.
  void hold() {
    int fd = -1;
    int error = leave_file_table();
    if (error == 0) {
      fd = open(settings.lock_file.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
      if (fd < 0) error = errno;
    }
    std::unique_lock<std::mutex> lock(mutex);
    start_error = error;
    phase = error == 0 ? Phase::kOut : Phase::kEnded;
    started.notify_all();
    while (error == 0) {
      turn_changed.wait(lock, [&] { return !waiting_requests.empty() || closing; });
      if (waiting_requests.empty()) break;
      set_phase(Phase::kAsking);
      off_t turn = 0;
      lock.unlock();
      const int refused = take_turn(fd, settings.holders, &turn);
      lock.lock();
      if (refused != 0) {
        fail_waiting(refused);
        set_phase(Phase::kOut);
        continue;
      }
      turn_bytes = 0;
      yielding = false;
      set_phase(Phase::kIn);
      room_changed.notify_one();
      while (true) {
        turn_changed.wait(lock, [&] { return in_flight == 0 && (yielding || waiting_requests.empty()); });
        if (yielding || closing) break;
        lingering = true;
        const bool more =
            turn_changed.wait_for(lock, kLinger, [&] { return in_flight > 0 || !waiting_requests.empty() || closing; });
        lingering = false;
        if (!more) break;
      }
      set_lock(fd, F_SETLK, F_UNLCK, turn);
      set_phase(Phase::kOut);
    }
    if (fd >= 0) ::close(fd);
    if (phase != Phase::kEnded) set_phase(Phase::kEnded);
  }

  // The thread that passes requests on when a turn has come, or when others have ended.
  void serve() {
    std::unique_lock<std::mutex> lock(mutex);
    while (true) {
      room_changed.wait(lock, [&] { return (room() && !passing) || ended_for_good; });
      if (ended_for_good) return;
      pass_on(lock);
    }
  }

  // Without the mutex: system calls. Looks at the turns first: who has one is what all wait for.
  pid_t holder() const {
    pid_t found = 0;
    if (!locked(probe, kFirstTurn, settings.holders, &found)) locked(probe, kLine, 1, &found);
    return found;
  }

  IoEngine& inner;
  CompletionQueue& queue;
  const Settings settings;
  int probe = -1;  // asks about the lock and never takes it

  std::mutex mutex;
  std::condition_variable started;
  std::condition_variable turn_changed;    // hold() waits
  std::condition_variable room_changed;    // serve() waits
  std::condition_variable watch_changed;   // next_report() waits
  std::condition_variable closer_changed;  // close() waits
  Phase phase = Phase::kStarting;
  int start_error = 0;
  std::deque<IoRequest> waiting_requests;
  std::uint64_t in_flight = 0;
  std::uint64_t in_flight_bytes = 0;
  std::uint64_t turn_bytes = 0;  // since the turn began, or since nobody was found waiting
  bool yielding = false;         // nothing more in this turn
  bool passing = false;
  bool lingering = false;
  bool closing = false;
  bool ended_for_good = false;
  Clock::time_point asked;
  std::uint32_t reports = 0;  // about the turn that is asked for
  bool watch_idle = false;
  std::thread server;
};

TakingTurns::TakingTurns(IoEngine& inner, CompletionQueue& queue, Settings settings) : owner_(getpid()) {
  if (settings.holders < 1) throw std::invalid_argument("holders must be at least 1");
  if (settings.turn_bytes < 1) throw std::invalid_argument("turn_bytes must be at least 1");
  if (!(settings.report_after_s > 0 && settings.report_after_s < 1e8))
    throw std::invalid_argument("report_after_s must be greater than 0 and less than three years");
  state_ = std::make_shared<State>(inner, queue, std::move(settings));
  State& state = *state_;
  state.probe = open(state.settings.lock_file.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
  if (state.probe < 0) throw std::system_error(errno, std::generic_category(), "open");
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    state.server = std::thread([&state] { state.serve(); });
    pthread_setname_np(state.server.native_handle(), "offload-turns");
    std::thread holder([self = state_] { self->hold(); });
    pthread_setname_np(holder.native_handle(), "offload-lock");
    // It may wait in the kernel for a turn that nobody wants any more, for as long as the
    // holder pleases.
    holder.detach();
  } catch (...) {
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    {
      std::lock_guard<std::mutex> lock(state.mutex);
      state.ended_for_good = true;
    }
    state.room_changed.notify_one();
    if (state.server.joinable()) state.server.join();
    throw;
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  std::unique_lock<std::mutex> lock(state.mutex);
  state.started.wait(lock, [&] { return state.phase != State::Phase::kStarting; });
  if (state.start_error == 0) return;
  state.ended_for_good = true;
  lock.unlock();
  state.room_changed.notify_one();
  state.server.join();
  throw std::system_error(state.start_error, std::generic_category(), "lock");
}

// In a forked child the threads do not exist, but their shares of the state do and keep it.
TakingTurns::~TakingTurns() { close(); }

int TakingTurns::register_buffers(void* address, std::size_t nbytes) {
  return state_->inner.register_buffers(address, nbytes);
}

int TakingTurns::register_file(std::shared_ptr<StoreFile> file) { return state_->inner.register_file(std::move(file)); }

void TakingTurns::set_depth(std::size_t depth) { state_->inner.set_depth(depth); }

void TakingTurns::submit(IoRequest request) {
  if (getpid() != owner_) throw std::runtime_error("turns belong to the process that takes them");
  State& state = *state_;
  std::unique_lock<std::mutex> lock(state.mutex);
  if (state.closing) throw std::runtime_error("I/O is closed");
  state.waiting_requests.push_back(std::move(request));
  if (state.phase == State::Phase::kIn) {
    state.pass_on(lock);
  } else {
    state.turn_changed.notify_one();
  }
}

void TakingTurns::close() {
  if (getpid() != owner_) return;
  State& state = *state_;
  {
    std::unique_lock<std::mutex> lock(state.mutex);
    if (state.ended_for_good) return;
    state.closing = true;
    state.turn_changed.notify_one();
    state.watch_changed.notify_all();
    const auto patience =
        std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(state.settings.report_after_s));
    while (state.phase != State::Phase::kEnded) {
      if (state.phase != State::Phase::kAsking) {
        state.closer_changed.wait(lock);
      } else if (Clock::now() < state.asked + patience) {
        state.closer_changed.wait_until(lock, state.asked + patience);
      } else {
        state.fail_waiting(ETIMEDOUT);
        break;
      }
    }
    state.ended_for_good = true;
  }
  state.room_changed.notify_one();
  state.server.join();
  state.inner.close();
}

std::optional<TurnWait> TakingTurns::next_report() {
  if (getpid() != owner_) return std::nullopt;
  State& state = *state_;
  std::unique_lock<std::mutex> lock(state.mutex);
  while (!state.closing) {
    if (state.phase != State::Phase::kAsking) {
      state.watch_idle = true;
      state.watch_changed.wait(lock);
      state.watch_idle = false;
      continue;
    }
    const double patience_s = state.settings.report_after_s * static_cast<double>(std::uint64_t{1} << state.reports);
    const auto due =
        state.asked + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(patience_s));
    if (Clock::now() < due) {
      state.watch_changed.wait_until(lock, due);
      continue;
    }
    if (state.reports < 30) ++state.reports;
    lock.unlock();
    return waiting();
  }
  return std::nullopt;
}

std::optional<TurnWait> TakingTurns::waiting() const {
  if (getpid() != owner_) return std::nullopt;
  State& state = *state_;
  std::unique_lock<std::mutex> lock(state.mutex);
  if (state.phase != State::Phase::kAsking) return std::nullopt;
  TurnWait wait;
  wait.waited_s = std::chrono::duration<double>(Clock::now() - state.asked).count();
  lock.unlock();
  wait.holder = state.holder();
  return wait;
}

}  // namespace offload
