//! The ladder: how close one to four drives of unequal speed come to the sum of their speeds.
//!
//! Paced drives (`paced-drive`) of 13.6 : 7.1 : 7.1 : 5.7 at 1:40 serve one model in several layouts. Each round runs every rung
//! once, so that a machine that changes changes all of them. What a run gave goes into a JSON file whole; medians and targets are
//! printed. Where FUSE cannot be used it says so and does nothing.

#[cfg(target_os = "linux")]
mod machine;
#[cfg(target_os = "linux")]
mod model;
#[cfg(target_os = "linux")]
mod mounts;
#[cfg(target_os = "linux")]
mod run;
#[cfg(target_os = "linux")]
mod rungs;
#[cfg(target_os = "linux")]
mod summary;

use std::process::ExitCode;

/// Errors of a tool are for whoever runs it: words are enough.
#[cfg(target_os = "linux")]
type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

#[cfg(target_os = "linux")]
mod command {
    use std::path::PathBuf;

    use clap::Parser;

    use crate::{Result, machine, model, run, rungs, summary};

    /// Measure one to four paced drives against the sum of their speeds.
    #[derive(Parser)]
    struct Args {
        /// Folder for the model, its packs and the mounts; 18 GB. What is there is used again
        #[arg(long, value_name = "DIR", default_value = "target/ladder")]
        scratch: PathBuf,
        /// The model's configuration
        #[arg(long, value_name = "FILE", default_value = "bench/configs/ladder.json")]
        config: PathBuf,
        /// Where the raw data goes
        #[arg(long, value_name = "FILE")]
        out: PathBuf,
        /// Runs of each rung
        #[arg(long, value_name = "N", default_value_t = 5)]
        rounds: usize,
        /// Tokens of each run that are timed
        #[arg(long, value_name = "N", default_value_t = 6)]
        tokens: usize,
        /// Only rungs whose name contains this
        #[arg(long, value_name = "TEXT", default_value = "")]
        only: String,
    }

    pub fn run() -> Result<()> {
        let args = Args::parse();
        if let Err(reason) = paced_drive::available() {
            println!("skipped: {reason}; the ladder needs FUSE");
            return Ok(());
        }
        let model = model::prepare(&args.scratch, &args.config)?;
        let rungs: Vec<_> = rungs::all(&model)
            .into_iter()
            .filter(|rung| rung.name.contains(&args.only))
            .collect();
        let mut runs = Vec::new();
        for round in 0..args.rounds {
            for rung in &rungs {
                let run = run::run(&model, rung, round, args.tokens, &args.scratch)?;
                println!("{}", summary::line(&run));
                runs.push(run);
            }
        }
        let report = serde_json::json!({
            "machine": machine::describe(),
            "date": machine::date(),
            "command": std::env::args().collect::<Vec<_>>().join(" "),
            "config": args.config,
            "rates": rungs::RATES,
            "medians": summary::medians(&rungs, &runs),
            "runs": runs,
        });
        if let Some(folder) = args.out.parent() {
            std::fs::create_dir_all(folder)?;
        }
        std::fs::write(&args.out, serde_json::to_string_pretty(&report)? + "\n")?;
        println!("{}", summary::table(&rungs, &runs));
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
    println!("skipped: the ladder needs Linux's FUSE");
    ExitCode::SUCCESS
}
