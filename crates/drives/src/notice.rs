//! Things that the user should be told but that stop nothing.

use std::fmt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

/// One such thing.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Notice {
    /// Files of this folder are read through the page cache, because direct reads were refused.
    Buffered {
        /// The folder of the first such file.
        folder: PathBuf,
        /// The operating system's reason.
        reason: String,
    },
    /// This drive failed several reads in a row. It is asked only for what no other drive holds, until a read succeeds.
    DriveOut {
        /// The drive's name: its first folder.
        drive: String,
        /// The last failure.
        reason: String,
    },
    /// A drive that was out has delivered again and is read as before.
    DriveBack {
        /// The drive's name: its first folder.
        drive: String,
    },
}

impl fmt::Display for Notice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Buffered { folder, reason } => write!(
                f,
                "{}: direct reads are refused ({reason}), so reads go through the page cache and are slower; \
                 a file system such as ext4 or xfs allows direct reads",
                folder.display()
            ),
            Self::DriveOut { drive, reason } => write!(
                f,
                "drive {drive} keeps failing and is read only where no other copy exists, which is slower: {reason}"
            ),
            Self::DriveBack { drive } => write!(f, "drive {drive} delivers again and is read as before"),
        }
    }
}

/// A list of notices. Clones share one list: hand one to whoever may add, keep one to show.
#[derive(Debug, Clone, Default)]
pub struct Notices {
    list: Arc<Mutex<Vec<Notice>>>,
}

impl Notices {
    /// Adds a notice, unless the list holds it already.
    pub fn add(&self, notice: Notice) {
        let mut list = self.list.lock().unwrap_or_else(PoisonError::into_inner);
        if !list.contains(&notice) {
            list.push(notice);
        }
    }

    /// Takes what was added since the last call.
    pub fn take(&self) -> Vec<Notice> {
        std::mem::take(&mut *self.list.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_notice_is_kept_once() {
        let notices = Notices::default();
        let notice = Notice::Buffered {
            folder: "/mnt/a".into(),
            reason: "Invalid argument".into(),
        };
        notices.clone().add(notice.clone());
        notices.add(notice.clone());
        assert_eq!(notices.take(), [notice]);
        assert!(notices.take().is_empty());
    }
}
