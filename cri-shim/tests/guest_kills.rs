//! Kills each process of a container's life at random moments; the next command has to clean up the
//! node. This needs a KVM that runs guests, and root.
//!
//! `PODVISOR_KILL_ROUNDS` is the number of rounds (a few by default), `PODVISOR_KILL_SEED` the
//! random seed: a failure prints it. `PODVISOR_START_ROUNDS` is the number of rounds of undisturbed
//! containers.

mod support;

use std::collections::BTreeSet;
use std::env;
use std::fs;
use std::io::{BufRead as _, BufReader};
use std::mem;
use std::process::Stdio;
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use support::host::{Host, kill, networks_left, own_address, processes, sandboxes};
use support::until;

/// The process to kill.
#[derive(Debug, Clone, Copy)]
enum Victim {
    Launcher,
    Sandbox,
    Both,
    /// The guest's kernel panics, which ends the agent, too.
    Guest,
}

const VICTIMS: [Victim; 4] = [
    Victim::Guest,
    Victim::Launcher,
    Victim::Sandbox,
    Victim::Both,
];

/// xorshift64*: sufficient to vary the moments.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) % bound
    }
}

fn setting(name: &str) -> Option<u64> {
    env::var(name).ok().map(|text| text.parse().unwrap())
}

impl Host {
    /// Returns everything that a container could leave: processes, groups, mounts, directories,
    /// files, networks.
    fn all_left(&self) -> BTreeSet<String> {
        let mut left: BTreeSet<String> = self.left().into_iter().collect();
        left.extend(networks_left());
        let networks = processes(|arguments| {
            let program = arguments
                .split(|byte| *byte == 0)
                .next()
                .unwrap_or_default();
            program.ends_with(b"passt") || program.ends_with(b"passt.avx2")
        });
        left.extend(networks.into_iter().map(|pid| format!("passt {pid}")));
        let files = fs::read_dir(self.root.path()).unwrap().flatten();
        left.extend(files.map(|file| file.file_name().into_string().unwrap()));
        left
    }

    /// Waits until only `clean` is left. A killed process, or a user-space network, is gone a
    /// moment later; `settle` is called before each check, and returns whether it is done.
    fn is_clean_again(&self, clean: &BTreeSet<String>, told: &str, settle: impl Fn() -> bool) {
        let mut more = Vec::new();
        until(told, || {
            let is_settled = settle();
            let before = mem::take(&mut more);
            let left = self.all_left();
            more = left.symmetric_difference(clean).cloned().collect();
            if more != before {
                println!("{told}: {more:?}");
            }
            more.is_empty() && is_settled
        });
    }
}

#[test]
fn guest_long_node_is_clean_after_kills_at_random_moments() {
    let host = Host::default();
    own_address();
    let data = host.root.path().join("data");
    fs::create_dir(&data).unwrap();
    let volume = format!("{}:/data", data.display());
    let run = |network| {
        let flags = ["run", "--name", "victim", "--memory", "128M"];
        let more = ["-e", "PATH=/bin", "-v", &volume, "--network", network];
        let command = [
            "-p",
            "18080:80",
            "box",
            "sh",
            "-c",
            "echo up; exec sleep 9999",
        ];
        let mut run = host.root.podvisor(&[&flags[..], &more, &command].concat());
        run.stdout(Stdio::piped()).spawn().unwrap()
    };
    // An undisturbed one, to measure its duration and what it leaves.
    let begin = Instant::now();
    let mut first = run("nat");
    let mut lines = BufReader::new(first.stdout.take().unwrap()).lines();
    assert_eq!(lines.next().unwrap().unwrap(), "up");
    let took = begin.elapsed();
    host.podvisor(&["rm", "-f", "victim"]).printed("victim\n");
    first.wait().unwrap();
    let clean = host.all_left();

    let rounds = setting("PODVISOR_KILL_ROUNDS").unwrap_or(4);
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    let seed = setting("PODVISOR_KILL_SEED").unwrap_or(now.subsec_nanos().into());
    let mut random = Random(seed | 1);
    for round in 0..rounds {
        let victim = VICTIMS[usize::try_from(round).unwrap() % VICTIMS.len()];
        let span = u64::try_from(took.as_millis()).unwrap() * 5 / 4;
        let delay = match victim {
            // The guest must have booted for that.
            Victim::Guest => span,
            _ => random.below(span),
        };
        // Each network with each victim.
        let network = match (round / 4 + round) % 2 {
            0 => "nat",
            _ => "user",
        };
        let told =
            format!("seed {seed}, round {round}: {victim:?} with {network} after {delay} ms");
        println!("{told}");
        let mut launcher = run(network);
        thread::sleep(Duration::from_millis(delay));
        match victim {
            Victim::Launcher => launcher.kill().unwrap(),
            Victim::Sandbox => sandboxes().into_iter().for_each(kill),
            Victim::Both => {
                launcher.kill().unwrap();
                sandboxes().into_iter().for_each(kill);
            }
            Victim::Guest => {
                let panic = "echo c >/proc/sysrq-trigger";
                until("the victim", || {
                    let ran = host.podvisor(&["debug", "victim", "sh", "-c", panic]);
                    !ran.stderr.contains("no container")
                });
            }
        }
        if !matches!(victim, Victim::Launcher | Victim::Both) {
            // If the launcher was killed before the machine started, the machine continues.
            host.podvisor(&["rm", "-f", "victim"]);
        }
        launcher.kill().unwrap();
        launcher.wait().unwrap();
        host.is_clean_again(&clean, &told, || {
            // The machine of a killed launcher continues, as intended.
            host.podvisor(&["rm", "-f", "victim"]);
            let listed = host.podvisor(&["ps", "-aq"]);
            assert_eq!(listed.code, Some(0), "{told}: {listed:?}");
            listed.stdout.is_empty()
        });
    }
}

/// Containers of all kinds start and end, and the node is as after the first ones.
#[test]
fn guest_rounds_of_containers_leave_nothing() {
    let host = Host::default();
    own_address();
    let ok = |line: &str| {
        let ran = host.podvisor(&line.split(' ').collect::<Vec<_>>());
        assert_eq!(ran.code, Some(0), "{line}: {ran:?}");
        ran.stdout
    };
    let own = "--memory 128M -e PATH=/bin";
    let round = |number: u64| {
        let echoed = ok(&format!("run --rm {own} --network none box echo {number}"));
        assert_eq!(echoed, format!("{number}\n"));
        ok(&format!(
            "run -d --name one {own} --network nat -p 18080:80 box sleep 9999"
        ));
        assert_eq!(ok("exec one echo in"), "in\n");
        ok("stop -t 0 one");
        ok("rm one");
        ok(&format!(
            "run --rm {own} --network user -p 18081:80/udp box true"
        ));
        ok("pod create --name pod --memory 128M");
        ok("run --rm -e PATH=/bin --pod pod box true");
        ok("pod rm -f pod");
    };
    round(0);
    let clean = host.all_left();
    let rounds = setting("PODVISOR_START_ROUNDS").unwrap_or(1);
    for number in 1..=rounds {
        round(number);
        println!("round {number} of {rounds}");
        // No command follows the last one to clean up after it.
        host.is_clean_again(&clean, &format!("round {number}"), || true);
    }
}
