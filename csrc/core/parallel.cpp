#include "core/parallel.h"

#include <dlfcn.h>
#include <pthread.h>
#include <unistd.h>
#if defined(__linux__)
#include <link.h>
#endif

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace turnwise {
namespace {

constexpr int kSpins = 4000;  // about 20 microseconds, longer than the gap between two passes of one op

struct Job {
    Job(int parts, const std::function<void(int)>& body) : parts(parts), body(body), left(parts) {}

    void work() {
        for (int part = next.fetch_add(1); part < parts; part = next.fetch_add(1)) {
            body(part);
            left.fetch_sub(1, std::memory_order_release);
        }
    }
    bool done() const { return left.load(std::memory_order_acquire) == 0; }

    const int parts;                       // number of parts
    const std::function<void(int)>& body;  // valid until done(), because the caller waits for that
    std::atomic<int> next{0};              // the first part that no thread has taken
    std::atomic<int> left;                 // parts that are not finished
};

class Pool {
  public:
    void run(int parts, const std::function<void(int)>& body) {
        auto job = std::make_shared<Job>(parts, body);
        // Publish the job, after starting the threads that it needs and that do not exist yet.
        {
            std::lock_guard<std::mutex> lock(mutex_);
            while (int(workers_.size()) < parts - 1) {
                workers_.emplace_back([this] { serve(); });
                workers_.back().detach();
            }
            job_ = job;
            generation_.fetch_add(1, std::memory_order_release);
        }
        wake_.notify_all();
        job->work();
        for (int spins = 0; !job->done(); ++spins) {
            if (spins > kSpins) std::this_thread::yield();
        }
    }

    std::mutex busy;  // held by the one caller that may use the workers

  private:
    void serve() {
        uint64_t seen = 0;
        for (;;) {
            for (int spins = 0; spins < kSpins && generation_.load(std::memory_order_acquire) == seen; ++spins) {
            }
            std::shared_ptr<Job> job;
            {
                std::unique_lock<std::mutex> lock(mutex_);
                wake_.wait(lock, [&] { return generation_.load(std::memory_order_relaxed) != seen; });
                seen = generation_.load(std::memory_order_relaxed);
                job = job_;
            }
            job->work();
        }
    }

    std::mutex mutex_;                     // guards job_ and workers_
    std::condition_variable wake_;         // signals a new generation
    std::shared_ptr<Job> job_;             // the latest job
    std::atomic<uint64_t> generation_{0};  // number of jobs so far
    std::vector<std::thread> workers_;     // detached
};

struct OwnedPool {
    explicit OwnedPool(pid_t owner) : owner(owner) {}

    const pid_t owner;  // the process whose threads these are
    Pool pool;          // usable in `owner` only
};

// The pool is never destroyed, because its threads may outlive static destructors. A forked child has none of these
// threads and makes a pool of its own. There is no lock here: if another thread held it during a fork, the child would
// wait forever.
Pool& pool() {
    static std::atomic<OwnedPool*> current{nullptr};
    const pid_t self = getpid();
    OwnedPool* found = current.load(std::memory_order_acquire);
    while (found == nullptr || found->owner != self) {
        OwnedPool* mine = new OwnedPool(self);
        if (current.compare_exchange_strong(found, mine, std::memory_order_acq_rel)) return mine->pool;
        delete mine;  // another thread was faster; `mine` has no workers yet
    }
    return found->pool;
}

// ---- The process's own OpenMP threads -----------------------------------------------------------------------------
// PyTorch's workers keep spinning for a while after each of its operations, and other threads would have to share the
// cores with them. So these workers do the work, through the function that compilers call for a parallel region.
using ParallelRegion = void (*)(void (*)(void*), void*, unsigned threads, unsigned flags);

#if defined(__linux__)

int keep_runtime(dl_phdr_info* info, size_t, void* found) {
    std::string& best = *static_cast<std::string*>(found);
    const std::string name = info->dlpi_name == nullptr ? "" : info->dlpi_name;
    const std::string file = name.substr(name.rfind('/') + 1);
    const bool runtime =
        file.rfind("libgomp", 0) == 0 || file.rfind("libiomp5", 0) == 0 || file.rfind("libomp", 0) == 0;
    // If several runtimes are loaded, prefer the one that came with PyTorch.
    if (runtime && (best.empty() || name.find("/torch") != std::string::npos)) best = name;
    return 0;
}

ParallelRegion find_parallel_region() {
    std::string name;
    dl_iterate_phdr(keep_runtime, &name);
    void* library = name.empty() ? nullptr : dlopen(name.c_str(), RTLD_NOLOAD | RTLD_NOW);
    return library == nullptr ? nullptr : reinterpret_cast<ParallelRegion>(dlsym(library, "GOMP_parallel"));
}

#else

ParallelRegion find_parallel_region() {
    return nullptr;
}

#endif

std::atomic<bool> forked{false};  // true in a forked child, which lacks the parent's threads; OpenMP does not notice

ParallelRegion parallel_region() {
    static const ParallelRegion found = [] {
        pthread_atfork(nullptr, nullptr, [] { forked.store(true); });
        return find_parallel_region();
    }();
    return forked.load(std::memory_order_relaxed) ? nullptr : found;
}

}  // namespace

void run_parts(int parts, const std::function<void(int)>& body) {
    const ParallelRegion region = parts > 1 ? parallel_region() : nullptr;
    // OpenMP's threads, or else the pool. If another caller has them, this thread runs all parts itself.
    if (region != nullptr) {
        static std::mutex busy;
        std::unique_lock<std::mutex> lock(busy, std::try_to_lock);
        if (lock.owns_lock()) {
            Job job(parts, body);
            region([](void* data) { static_cast<Job*>(data)->work(); }, &job, unsigned(parts), 0);
            return;
        }
    } else if (parts > 1) {
        Pool& workers = pool();
        std::unique_lock<std::mutex> lock(workers.busy, std::try_to_lock);
        if (lock.owns_lock()) {
            workers.run(parts, body);
            return;
        }
    }
    for (int part = 0; part < parts; ++part) body(part);
}

}  // namespace turnwise
