//! How close to the sum of unequal drives do rules come that say which drive reads what?
//!
//! `cargo run --release -p drives --example policies` prints the share of the drives' added rates that each rule reaches, on the
//! same routes: 16 of 896 experts of Kimi K3's size a layer, skewed and partly carried over from the token before, on four drives
//! of 13.6, 7.1, 7.1 and 5.7 GB/s that hold all experts, or the most used part of them. With jitter each drive's rate differs by
//! up to 15 % from layer to layer, and no rule is told. Ours runs as it is, on simulated drives; the others are told once how
//! fast the drives are, and then decide when a layer's experts are known. The last column sets pulling against the shortest time in
//! which the homes can deliver each layer at the rates that were measured before it: what the layout allows.

#[path = "policies/mod.rs"]
mod policies;

use policies::{LAYOUTS, RULES, fraction, fraction_of_bound, world};

fn main() {
    println!(
        "share of 33.5 GB/s, {} barriers each",
        policies::TOKENS * policies::LAYERS
    );
    print!("{:<24}{:>7}", "layout", "jitter");
    for rule in RULES {
        print!("{:>14}", rule.name());
    }
    println!("{:>16}", "pull, of bound");
    for (name, shares) in LAYOUTS {
        let world = world(&shares);
        for jitter in [0.0, 0.15] {
            print!("{name:<24}{:>6.0}%", jitter * 100.0);
            for rule in RULES {
                print!("{:>14.3}", fraction(&world, rule, jitter));
            }
            println!("{:>16.3}", fraction_of_bound(&world, jitter));
        }
    }
}
