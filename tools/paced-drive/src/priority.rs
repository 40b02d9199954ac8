//! The order in which threads get a processor.

/// Puts the calling thread, and threads that it starts, in front of all ordinary ones, as a drive's own electronics would not
/// wait for the machine's processors either. Where that is not allowed nothing happens, and answers come late on a busy machine.
pub(crate) fn before_others() {
    let first = libc::sched_param { sched_priority: 1 };
    // SAFETY: 0 names the calling thread, and the parameter lives until the call returns.
    let _ = unsafe { libc::sched_setscheduler(0, libc::SCHED_RR, &raw const first) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_thread_goes_first_or_stays_as_it_was() {
        std::thread::spawn(|| {
            // SAFETY: 0 names the calling thread.
            let policy = || unsafe { libc::sched_getscheduler(0) };
            let before = policy();
            before_others();
            assert!([libc::SCHED_RR, before].contains(&policy()));
        })
        .join()
        .unwrap();
    }
}
