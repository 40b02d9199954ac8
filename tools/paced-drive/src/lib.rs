//! A drive of a chosen speed, for tests and measurements.
//!
//! A [`PacedDrive`] is a FUSE mount that serves the files of a folder, or one file, read-only, as fast as a drive of a given
//! bandwidth would. Each read takes its time on the drive's own clock: it begins when the read before it is done, lasts its bytes
//! divided by the bandwidth, and is answered at that moment plus a latency: never before, and where its threads may go before all
//! others (as root) a fraction of a millisecond after. Many reads may wait at once. Each mount is a device of its own (`st_dev`), so a program
//! takes four mounts for four drives.
//!
//! [`Command`]s change the speed and bring faults while it runs. They come from a [`Control`], or are written to the file `control`
//! in the mount, one a line. Reading that file gives a [`Status`] as JSON: among others the bytes served, exact to the byte.
//!
//! Files are those that the folder has when it is mounted; they must stay as they are. Reads of more than 1 MiB arrive here in
//! parts, since that is the most that the kernel asks for at once; the parts of a direct asynchronous read arrive together.
//!
//! ```no_run
//! use paced_drive::{Command, Pace, PacedDrive};
//! use std::path::Path;
//!
//! # fn main() -> Result<(), paced_drive::Error> {
//! let drive = PacedDrive::mount(Path::new("models"), Path::new("mnt/a"), Pace { rate: 340e6, ..Pace::default() })?;
//! drive.control().run(Command::Rate(170e6));
//! println!("{} bytes served", drive.control().status().bytes);
//! # Ok(())
//! # }
//! ```
#![cfg(target_os = "linux")]

mod clock;
mod control;
mod drive;
mod error;
mod filesystem;
mod priority;
mod queue;
mod source;

pub use clock::Pace;
pub use control::{CONTROL_NAME, Command, Control, Status};
pub use drive::{PacedDrive, available};
pub use error::Error;
