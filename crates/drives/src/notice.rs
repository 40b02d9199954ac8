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
    /// Bytes of experts differed from their checksum and were read again, this time rightly.
    Corrupt {
        /// The first of the experts.
        expert: ExpertId,
        /// How often it was found with these files: once for each chunk and reading.
        times: u64,
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
    /// A file that is kept so that work is done once was made, mended or dropped.
    KeptFile {
        /// The file.
        path: PathBuf,
        /// What happened to it.
        what: String,
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
            Self::Corrupt { expert, times, files } if files.is_empty() => write!(
                f,
                "expert {expert}{}: found bytes that differ from their checksum and were right when read again; \
                 check the cables and memory of this machine",
                more(*times)
            ),
            Self::Corrupt { expert, times, files } => {
                write!(
                    f,
                    "expert {expert}{}: found bytes that differ from their checksum in",
                    more(*times)
                )?;
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
            Self::KeptFile { path, what } => write!(f, "{}: {what}", path.display()),
        }
    }
}

/// That something was met more than once.
fn more(times: u64) -> String {
    match times {
        0 | 1 => String::new(),
        _ => format!(" and {} times more", times - 1),
    }
}

/// A list of notices. Clones share one list: hand one to whoever may add, keep one to show.
#[derive(Debug, Clone, Default)]
pub struct Notices {
    list: Arc<Mutex<Vec<Notice>>>,
}

impl Notices {
    /// Adds a notice, unless the list holds it already. A damaged file gets one notice for all its experts.
    pub fn add(&self, notice: Notice) {
        let mut list = self.list.lock().unwrap_or_else(PoisonError::into_inner);
        if let Notice::Corrupt {
            times: new, files: of, ..
        } = &notice
        {
            let known = list.iter_mut().find_map(|known| match known {
                Notice::Corrupt { times, files, .. } if files == of => Some(times),
                _ => None,
            });
            if let Some(times) = known {
                *times += new;
                return;
            }
        }
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
    fn a_damaged_file_is_one_notice() {
        let notices = Notices::default();
        let corrupt = |expert, file: &str| Notice::Corrupt {
            expert: ExpertId { layer: 1, expert },
            times: 1,
            files: vec![file.into()],
        };
        for (expert, file) in [(5, "/a"), (6, "/a"), (5, "/b"), (5, "/a")] {
            notices.add(corrupt(expert, file));
        }
        let texts: Vec<String> = notices.take().iter().map(Notice::to_string).collect();
        assert_eq!(texts.len(), 2);
        assert!(
            texts[0].starts_with("expert 1/5 and 2 times more: found") && texts[0].contains(" /a,"),
            "{texts:?}"
        );
        assert!(texts[1].starts_with("expert 1/5: found"), "{texts:?}");
    }

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
