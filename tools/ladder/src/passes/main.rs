//! What sharing a pass is worth: a long prompt in one pass, and batches of growing size, on one paced drive.
//!
//! The model (`bench/configs/passes.json`) is a K3 of small width whose experts are 2.2 GB, several times the engine's memory; 512
//! rows give its 448 experts 18 rows each on average, where K3's 896 get 9. The drive is slow enough for reads to be the bound on
//! a machine of two cores. What a run gave goes into a JSON file whole; medians and targets are printed. Where FUSE cannot be
//! used it says so and does nothing.

#[cfg(target_os = "linux")]
mod batches;
#[cfg(target_os = "linux")]
#[path = "../machine.rs"]
mod machine;
#[cfg(target_os = "linux")]
#[path = "../mounts.rs"]
mod mounts;
#[cfg(target_os = "linux")]
mod prompt;
#[cfg(target_os = "linux")]
mod rig;

use std::process::ExitCode;

/// Errors of a tool are for whoever runs it: words are enough.
#[cfg(target_os = "linux")]
type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

#[cfg(target_os = "linux")]
mod command {
    use std::path::PathBuf;

    use clap::Parser;

    use crate::rig::Rig;
    use crate::{Result, batches, machine, prompt};

    /// Measure long prompts and batches against what their reads allow.
    #[derive(Parser)]
    struct Args {
        /// Folder for the model and the mount; 5 GB. What is there is used again
        #[arg(long, value_name = "DIR", default_value = "target/passes")]
        scratch: PathBuf,
        /// The model's configuration
        #[arg(long, value_name = "FILE", default_value = "bench/configs/passes.json")]
        config: PathBuf,
        /// Where the raw data goes
        #[arg(long, value_name = "FILE")]
        out: PathBuf,
        /// The drive's bandwidth, in MB a second
        #[arg(long, value_name = "N", default_value_t = 250.0)]
        rate: f64,
        /// Runs of each set-up
        #[arg(long, value_name = "N", default_value_t = 3)]
        rounds: usize,
        /// Passes of each batch that are timed
        #[arg(long, value_name = "N", default_value_t = 3)]
        passes: usize,
        /// Only the prompt, or only the batches
        #[arg(long, value_name = "NAME", value_parser = ["prompt", "batches"])]
        only: Option<String>,
    }

    pub fn run() -> Result<()> {
        let args = Args::parse();
        if let Err(reason) = paced_drive::available() {
            println!("skipped: {reason}; this measurement needs FUSE");
            return Ok(());
        }
        let rig = Rig::prepare(&args.scratch, &args.config, args.rate * 1e6)?;
        let wanted = |name| args.only.as_deref().is_none_or(|only| only == name);
        let (mut prompts, mut batches) = (vec![], vec![]);
        for round in 0..args.rounds {
            if wanted("prompt") {
                prompts.extend(prompt::round(&rig, round)?);
            }
            if wanted("batches") {
                batches.extend(batches::round(&rig, round, args.passes)?);
            }
        }
        let report = serde_json::json!({
            "machine": machine::describe(),
            "date": machine::date(),
            "command": std::env::args().collect::<Vec<_>>().join(" "),
            "config": args.config,
            "rate": args.rate * 1e6,
            "memory": crate::rig::MEMORY,
            "prompts": prompts,
            "batches": batches,
        });
        if let Some(folder) = args.out.parent() {
            std::fs::create_dir_all(folder)?;
        }
        std::fs::write(&args.out, serde_json::to_string_pretty(&report)? + "\n")?;
        if wanted("prompt") {
            println!("{}", prompt::table(&prompts));
        }
        if wanted("batches") {
            println!("{}", batches::table(&batches));
        }
        println!("raw data: {}", args.out.display());
        Ok(())
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
    println!("skipped: this measurement needs Linux's FUSE");
    ExitCode::SUCCESS
}
