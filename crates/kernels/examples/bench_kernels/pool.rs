//! What the compute threads cost by themselves: a fork and join, and waiting.

use crate::floors::{median, seconds};
use crate::processor_time::processor_time;
use kernels::{Backend, Cpu, Isa};
use std::time::Duration;

const CALLS: usize = 2_000;
const CALLS_AFTER_SLEEP: usize = 100;
/// Between two calls: long after the threads have gone to sleep.
const PAUSE: Duration = Duration::from_millis(3);
const IDLE: Duration = Duration::from_secs(1);

/// Microseconds of a fork and join, one after the other and after a pause, and the share of a processor that the threads of an idle
/// back end take; `null` where the system does not count it.
pub fn measure(threads: usize) -> String {
    let cpu = Cpu::new(Isa::detect(), threads).unwrap();
    // A number for each thread: next to nothing to do.
    let mut x = cpu.act(threads, 1);
    cpu.upload_bf16(&vec![0; 2 * threads], &mut x);
    let mut call = || seconds(|| cpu.sigmoid(&mut x)) * 1e6;
    let hot = median((0..CALLS).map(|_| call()).collect());
    let cold = median(
        (0..CALLS_AFTER_SLEEP)
            .map(|_| {
                std::thread::sleep(PAUSE);
                call()
            })
            .collect(),
    );
    let before = processor_time();
    std::thread::sleep(IDLE);
    let idle = before
        .zip(processor_time())
        .map(|(before, after)| (after - before).div_duration_f64(IDLE));
    let idle = idle.map_or("null".into(), |share| format!("{share:.5}"));
    format!(
        "{{\"kernel\":\"fork and join\",\"isa\":\"{}\",\"threads\":{threads},\"microseconds\":{hot:.2},\
         \"microseconds_after_pause\":{cold:.2},\"idle_processor_share\":{idle}}}",
        cpu.isa()
    )
}
