//! Things that the user should be told but that stop nothing.

use std::fmt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use crate::layout::ExpertId;

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
    /// Bytes of an expert differed from their checksum and were read again, this time rightly.
    Corrupt {
        /// The expert.
        expert: ExpertId,
        /// Files that gave wrong bytes, or none, at the second reading as well.
        files: Vec<PathBuf>,
    },
    /// Reads are made by threads, because io_uring was refused.
    Threads {
        /// The operating system's reason.
        reason: String,
    },
    /// io_uring reads into memory that is not registered with it.
    Unregistered {
        /// Bytes that were to be registered.
        bytes: usize,
        /// The operating system's reason.
        reason: String,
    },
    /// A remembered profile of the drives was not used, so they were measured again.
    ProfileDropped {
        /// The file that it was remembered in.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// A profile of the drives could not be remembered, so they will be measured again at the next start.
    ProfileNotKept {
        /// The file that it was to be remembered in.
        path: PathBuf,
        /// The operating system's reason.
        reason: String,
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
            Self::Corrupt { expert, files } if files.is_empty() => write!(
                f,
                "expert {expert}: found bytes that differ from their checksum and were right when read again; \
                 check the cables and memory of this machine"
            ),
            Self::Corrupt { expert, files } => {
                write!(f, "expert {expert}: found bytes that differ from their checksum in")?;
                for file in files {
                    write!(f, " {}", file.display())?;
                }
                write!(
                    f,
                    ", and read another copy; verify these files and place or fetch them again"
                )
            }
            Self::Threads { reason } => write!(
                f,
                "io_uring is refused ({reason}), so threads read instead and take more of the processor; \
                 kernel 5.6 or later, sysctl kernel.io_uring_disabled=0 and a container profile that permits it allow io_uring"
            ),
            Self::Unregistered { bytes, reason } => write!(
                f,
                "the kernel cannot register {bytes} bytes of read memory ({reason}), so each read maps its own pages and takes \
                 more of the processor; a limit on locked memory (ulimit -l) of at least {} KiB allows it",
                bytes.div_ceil(1024)
            ),
            Self::ProfileDropped { path, reason } => write!(
                f,
                "{}: the remembered profile of the drives is not used ({reason}), so they were measured again",
                path.display()
            ),
            Self::ProfileNotKept { path, reason } => write!(
                f,
                "{}: cannot remember the profile of the drives ({reason}), so they will be measured at the next start too; \
                 name a file in a folder that you may write to",
                path.display()
            ),
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
