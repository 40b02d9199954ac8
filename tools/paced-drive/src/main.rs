//! `paced-drive`: mounts a drive of a chosen speed and serves it until it is unmounted or interrupted.

use std::process::ExitCode;

#[cfg(target_os = "linux")]
mod command {
    use std::path::PathBuf;

    use clap::Parser;
    use paced_drive::{Error, Pace, PacedDrive};

    /// Serve the files of a folder, or one file, as fast as a drive of a given bandwidth would.
    ///
    /// Lines written to the file `control` in the mount change it: rate MB_PER_S, latency US, fail COUNT, stall MS, vanish,
    /// return. Reading that file gives sums as JSON.
    #[derive(Parser)]
    #[command(name = "paced-drive", version)]
    struct Args {
        /// A file, or a folder whose files are served
        source: PathBuf,
        /// The folder to mount at
        mount: PathBuf,
        /// Bandwidth in megabytes (10^6 bytes) a second
        #[arg(long, value_name = "MB_PER_S")]
        rate: f64,
        /// From the last byte of a read to its answer, in microseconds
        #[arg(long, value_name = "US", default_value_t = 80)]
        latency: u32,
    }

    pub fn run() -> Result<(), String> {
        let args = Args::parse();
        let pace = Pace {
            rate: args.rate * 1e6,
            latency_ns: u64::from(args.latency) * 1000,
        };
        let words = |error: Error| error.to_string();
        let drive = PacedDrive::mount(&args.source, &args.mount, pace).map_err(words)?;
        let at = drive.path().to_owned();
        ctrlc::set_handler(move || {
            // Unmounting ends the wait below; where it fails, the user sees umount's words.
            let _ = std::process::Command::new("umount").arg("--lazy").arg(&at).status();
        })
        .map_err(|error| format!("cannot listen for signals: {error}; report it"))?;
        drive.wait().map_err(words)
    }
}

#[cfg(target_os = "linux")]
fn main() -> ExitCode {
    match command::run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

#[cfg(not(target_os = "linux"))]
fn main() -> ExitCode {
    eprintln!("error: found a system without Linux's FUSE, expected Linux; run it there");
    ExitCode::FAILURE
}
