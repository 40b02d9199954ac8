//! Wakes a thread that sleeps in the kernel, and costs no system call while that thread is awake.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::task::Wake;

use rustix::event::{EventfdFlags, eventfd};

const AWAKE: u8 = 0;
const ASLEEP: u8 = 1;
const RUNG: u8 = 2;

/// An event descriptor that is written only when somebody sleeps on it.
pub(super) struct Bell {
    event: OwnedFd,
    state: AtomicU8,
}

impl Bell {
    pub(super) fn new() -> io::Result<Arc<Self>> {
        Ok(Arc::new(Self {
            event: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            state: AtomicU8::new(AWAKE),
        }))
    }

    /// Announces sleep. False when the bell was rung since [`rise`](Self::rise): then there is nothing to sleep for.
    pub(super) fn lie_down(&self) -> bool {
        self.state.swap(ASLEEP, Ordering::AcqRel) != RUNG
    }

    /// Whether the bell was rung since [`lie_down`](Self::lie_down).
    pub(super) fn is_rung(&self) -> bool {
        self.state.load(Ordering::Acquire) == RUNG
    }

    /// Ends sleep. What was rung until now counts as heard.
    pub(super) fn rise(&self) {
        self.state.swap(AWAKE, Ordering::AcqRel);
    }

    /// Makes the descriptor unreadable again.
    pub(super) fn quieten(&self) {
        // It fails only when there is nothing to read, which is what is wanted.
        let _ = rustix::io::read(&self.event, &mut [0; 8]);
    }
}

impl AsFd for Bell {
    /// Readable after the bell was rung on a sleeper.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}

impl Wake for Bell {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if self.state.swap(RUNG, Ordering::AcqRel) == ASLEEP {
            // It fails only when the counter is near 2^64, and then the descriptor is readable.
            let _ = rustix::io::write(&self.event, &1u64.to_ne_bytes());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn readable(bell: &Bell) -> bool {
        rustix::io::read(&bell.event, &mut [0; 8]).is_ok()
    }

    #[test]
    fn only_a_sleeper_costs_a_system_call() {
        let bell = Bell::new().unwrap();
        bell.wake_by_ref();
        assert!(!readable(&bell));
        assert!(!bell.lie_down(), "rung before");
        bell.rise();
        assert!(bell.lie_down());
        assert!(!bell.is_rung());
        bell.wake_by_ref();
        bell.wake_by_ref();
        assert!(bell.is_rung());
        assert!(readable(&bell));
        assert!(!readable(&bell), "written once");
        bell.rise();
        assert!(bell.lie_down(), "heard");
    }
}
