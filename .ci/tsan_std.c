// What the thread sanitizer cannot see of the standard library.
//
// The library comes compiled without the sanitizer. Its mutexes, condition variables and once cells are partly inlined into our code,
// where the sanitizer sees them, and partly functions of the library, where it does not: a lock that is taken after waiting then
// seems to be no lock at all, and everything that it guards is reported. The linker puts these wrappers (`--wrap`) around
// those functions; they tell the sanitizer what the functions do. `.ci/sanitize` passes the functions' mangled names.
#include <stdbool.h>
#include <stdint.h>

void __tsan_acquire(void *address);
void __tsan_release(void *address);

#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
#define REAL(name) JOIN(__real_, name)
#define WRAP(name) JOIN(__wrap_, name)

// Waits until it has locked. Unlocking is inlined into callers.
#define LOCK(name)                                                                                                                         \
    void REAL(name)(void *lock);                                                                                                           \
    void WRAP(name)(void *lock) {                                                                                                          \
        REAL(name)(lock);                                                                                                                  \
        __tsan_acquire(lock);                                                                                                              \
    }
LOCK(MUTEX_LOCK)
LOCK(RWLOCK_READ)
LOCK(RWLOCK_WRITE)

// Unlock the mutex, wait, and lock it again.
void REAL(CONDVAR_WAIT)(void *condvar, void *mutex);
void WRAP(CONDVAR_WAIT)(void *condvar, void *mutex) {
    __tsan_release(mutex);
    REAL(CONDVAR_WAIT)(condvar, mutex);
    __tsan_acquire(mutex);
}

bool REAL(CONDVAR_WAIT_TIMEOUT)(void *condvar, void *mutex, uint64_t seconds, uint32_t nanoseconds);
bool WRAP(CONDVAR_WAIT_TIMEOUT)(void *condvar, void *mutex, uint64_t seconds, uint32_t nanoseconds) {
    __tsan_release(mutex);
    bool woken = REAL(CONDVAR_WAIT_TIMEOUT)(condvar, mutex, seconds, nanoseconds);
    __tsan_acquire(mutex);
    return woken;
}

// Runs a closure once, or waits for who runs it. `closure` and `methods` are one trait object.
void REAL(ONCE_CALL)(void *once, bool ignore_poison, void *closure, void *methods, void *caller);
void WRAP(ONCE_CALL)(void *once, bool ignore_poison, void *closure, void *methods, void *caller) {
    REAL(ONCE_CALL)(once, ignore_poison, closure, methods, caller);
    __tsan_release(once);
    __tsan_acquire(once);
}
