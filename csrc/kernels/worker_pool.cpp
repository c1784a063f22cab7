#include "worker_pool.h"

#include <unistd.h>
#include <csignal>
#include <new>
#include <stdexcept>
#include <utility>

#include <pthread.h>

#include "../runtime/completion_queue.h"
#include "float_environment.h"

namespace offload {

// What workers touch. They share it, so that a pool abandoned after a fork can simply be forgotten.
struct WorkerPool::State {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::shared_ptr<Job>> jobs;
  bool closed = false;

  // Run pieces until none is left to take.
  static void work_on(Job& job) noexcept {
    for (;;) {
      const std::size_t piece = job.next_.fetch_add(1, std::memory_order_relaxed);
      if (piece >= job.pieces_) return;
      if (piece == 0) job.started_s_ = monotonic_seconds();
      job.run_piece(piece);
      // Release what this piece wrote; the last one acquires what all others did.
      if (job.done_.fetch_add(1, std::memory_order_acq_rel) + 1 == job.pieces_) {
        job.finished(job.started_s_, monotonic_seconds());
        return;
      }
    }
  }

  // A worker's life. A job stays at the front, where other workers find it, until somebody has taken its last piece;
  // the first worker that comes back from it removes it. Once closed, workers finish the jobs that are there.
  void work() noexcept {
    const DefaultFloatEnvironment environment;
    std::unique_lock<std::mutex> lock(mutex);
    for (;;) {
      changed.wait(lock, [this] { return closed || !jobs.empty(); });
      if (jobs.empty()) return;
      const std::shared_ptr<Job> job = jobs.front();
      lock.unlock();
      work_on(*job);
      lock.lock();
      if (!jobs.empty() && jobs.front() == job) jobs.pop_front();
    }
  }
};

WorkerPool::WorkerPool(unsigned threads) : threads_(threads), pid_(getpid()), state_(std::make_shared<State>()) {
  if (threads == 0) throw std::invalid_argument("a worker pool needs at least one thread");
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);  // inherited by the workers
  try {
    workers_.reserve(threads);
    for (unsigned i = 0; i < threads; ++i) {
      workers_.emplace_back([state = state_] { state->work(); });
#if defined(__linux__)
      pthread_setname_np(workers_.back().native_handle(), "offload-update");
#endif
    }
  } catch (...) {
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    close();
    throw;
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

WorkerPool::~WorkerPool() { close(); }

std::unique_lock<std::mutex> WorkerPool::lock_open() {
  // The process first: a fork may have copied the mutex while a worker held it.
  if (getpid() != pid_) throw std::logic_error("the worker pool belongs to the parent process");
  std::unique_lock<std::mutex> lock(state_->mutex);
  if (state_->closed) throw std::logic_error("the worker pool is closed");
  return lock;
}

void WorkerPool::submit(std::shared_ptr<Job> job) {
  std::unique_lock<std::mutex> lock = lock_open();
  if (job->pieces() == 0) {
    lock.unlock();
    const double now_s = monotonic_seconds();
    job->finished(now_s, now_s);
    return;
  }
  state_->jobs.push_back(std::move(job));
  lock.unlock();
  state_->changed.notify_all();
}

namespace {

// Stands in a pool's queue for a job on somebody's stack, and wakes them when it has ended. `run` runs a piece of
// that job: `Job` lets only the pool do it, so the pool hands a function in.
class Waiting final : public Job {
 public:
  using Run = void (*)(Job&, std::size_t);
  Waiting(Job& inner, Run run) : Job(inner.pieces()), inner_(inner), run_(run) {}

  void wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    ended_.wait(lock, [this] { return done_; });
  }
  double started_s = 0.0, finished_s = 0.0;

 protected:
  void run_piece(std::size_t piece) noexcept override { run_(inner_, piece); }
  void finished(double started, double ended) noexcept override {
    started_s = started;
    finished_s = ended;
    std::lock_guard<std::mutex> lock(mutex_);
    done_ = true;
    ended_.notify_all();
  }

 private:
  Job& inner_;
  Run run_;
  std::mutex mutex_;
  std::condition_variable ended_;
  bool done_ = false;
};

}  // namespace

void WorkerPool::run(Job& job) {
  if (job.pieces() <= 1) {
    lock_open();  // only to check that the pool is open; the lock is released at once
    const DefaultFloatEnvironment environment;
    const double started_s = monotonic_seconds();
    if (job.pieces() == 1) job.run_piece(0);
    job.finished(started_s, monotonic_seconds());
    return;
  }
  // Shared with the workers: one may still hold it for a moment after it has ended.
  const auto waiting = std::make_shared<Waiting>(job, [](Job& inner, std::size_t piece) { inner.run_piece(piece); });
  submit(waiting);
  waiting->wait();
  job.finished(waiting->started_s, waiting->finished_s);
}

void WorkerPool::close() {
  std::lock_guard<std::mutex> only_one(closing_);
  if (getpid() != pid_) {
    // Joining or destroying handles of threads that a fork did not copy is undefined; leak them.
    new std::vector<std::thread>(std::move(workers_));
    new std::shared_ptr<State>(std::move(state_));
    state_ = std::make_shared<State>();
    state_->closed = true;
    workers_.clear();
    return;
  }
  {
    std::lock_guard<std::mutex> lock(state_->mutex);
    state_->closed = true;
  }
  state_->changed.notify_all();
  for (std::thread& worker : workers_)
    if (worker.joinable()) worker.join();
  workers_.clear();
}

}  // namespace offload
