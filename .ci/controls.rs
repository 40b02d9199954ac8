//! Errors that the sanitizers must find, and a lock that they must not report. `.ci/sanitize` runs it to see that they work.

use std::sync::Mutex;

struct Shared(std::cell::UnsafeCell<u64>);
// SAFETY: not safe: that is the point.
unsafe impl Sync for Shared {}

static SHARED: Shared = Shared(std::cell::UnsafeCell::new(0));
static LOCK: Mutex<()> = Mutex::new(());

fn count(locked: bool) {
    std::thread::scope(|s| {
        for _ in 0..4 {
            s.spawn(|| {
                for _ in 0..10_000 {
                    let _held = locked.then(|| LOCK.lock());
                    // SAFETY: none without the lock.
                    unsafe { *SHARED.0.get() += 1 }
                }
            });
        }
    });
}

fn main() {
    match std::env::args().nth(1).as_deref() {
        Some("locked") => count(true),
        Some("race") => count(false),
        Some("overrun") => {
            let bytes = std::hint::black_box(vec![0_u8; 64]);
            // SAFETY: none: one byte beyond.
            println!("{}", unsafe { std::hint::black_box(bytes.as_ptr().add(64)).read() });
        }
        Some("leak") => std::mem::forget(std::hint::black_box(vec![0_u8; 64])),
        other => panic!("control {other:?}: expected locked, race, overrun or leak"),
    }
}
