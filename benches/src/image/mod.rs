//! An image as a disk (virtio-blk) and as memory (virtio-pmem with DAX): the cost in the guest
//! until it reads, and the host memory that many guests use that read one image.
//!
//! The guest's init (`benches/guest/image.c`) writes a line after each step; the CPU time of the
//! monitor's threads until then is the cost of the steps before.

mod host;

use std::fmt;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{ChildStdout, Command, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, bail};
use serde::Serialize;

use crate::boot::{Kind, Running, Stage, ahead_of_others, take};
use crate::output;
use host::{HostMemory, Private};

/// MiB of guest memory.
const MEMORY: u64 = 256;
/// The size of each of the two files that are read, and of the rest of the image.
const READ: usize = 50 << 20;
const REST: u64 = 100 << 20;
/// The lines that the guest writes after each step.
const STEPS: [&str; 6] = ["up", "mounted", "first", "read", "mapped", "again"];
/// The step after which memory is measured.
const ALL_READ: &str = "read";

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The guest's kernel, an uncompressed ELF file
    #[arg(long, value_name = "FILE")]
    kernel: PathBuf,
    /// The guest's initramfs, whose init reads the image
    #[arg(long, value_name = "FILE")]
    initramfs: PathBuf,
    /// The program that runs a guest with an image by podvisor's library
    #[arg(long, value_name = "FILE")]
    podvisor: PathBuf,
    /// Look at the memory of machines with their image as this (blk, pmem), and not at steps
    #[arg(long, value_name = "WAY")]
    memory_of: Option<String>,
    /// Machines that read the image at once, for their memory
    #[arg(long, value_name = "N", default_value_t = 20)]
    machines: u32,
    /// Time is counted in instructions here: one nanosecond each
    #[arg(long)]
    icount: bool,
    /// Write the results as JSON to this file, or to stdout (`-`)
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

#[derive(Debug, Serialize)]
struct Report {
    unit: &'static str,
    steps: Vec<Row>,
    memory: Option<Memory>,
}

#[derive(Debug, Serialize)]
struct Row {
    name: &'static str,
    /// CPU cost of each step, in millions of instructions, or in ms.
    steps: Vec<f64>,
    /// The guest's free memory when its init starts, in MiB.
    free: f64,
}

/// The memory of one of many machines, in MiB.
#[derive(Debug, Serialize)]
struct Memory {
    name: &'static str,
    machines: u32,
    /// The private memory of its process.
    private: f64,
    /// The decrease of the host's available memory, including page tables of processes and of KVM.
    host: f64,
    /// Page tables of processes and of guests.
    tables: f64,
}

/// A way to attach the image to a guest.
#[derive(Clone, Copy, Debug)]
struct Way {
    name: &'static str,
    device: &'static str,
}

const WAYS: [Way; 2] = [
    Way {
        name: "blk",
        device: "/dev/vda",
    },
    Way {
        name: "pmem",
        device: "/dev/pmem0",
    },
];

/// The files that every machine is started with.
#[derive(Debug)]
struct Files {
    dir: PathBuf,
    podvisor: PathBuf,
    kernel: PathBuf,
    initramfs: PathBuf,
    image: PathBuf,
}

pub(crate) fn command(args: &Args) -> Result<()> {
    let stage = Stage::new()?;
    let files = Files {
        dir: stage.path().to_owned(),
        podvisor: stage.copy(&args.podvisor)?,
        kernel: stage.copy(&args.kernel)?,
        initramfs: stage.copy(&args.initramfs)?,
        image: make_image(stage.path())?,
    };
    let mut report = Report {
        unit: if args.icount {
            "M instructions"
        } else {
            "ms of CPU"
        },
        steps: Vec::new(),
        memory: None,
    };
    if let Some(name) = &args.memory_of {
        let way = WAYS.iter().find(|way| way.name == name);
        let way = way.with_context(|| format!("an image is no {name:?}"))?;
        report.memory = Some(memory(&files, *way, args.machines.max(1))?);
    } else {
        let _first = ahead_of_others();
        for way in WAYS {
            let row = steps(&files, way);
            report
                .steps
                .push(row.with_context(|| format!("{} was not measured", way.name))?);
        }
    }
    output::print(&report, args.json.as_deref())
}

/// Creates an EROFS image of two files whose pages all differ, and one file that is never read.
fn make_image(dir: &Path) -> Result<PathBuf> {
    let tree = dir.join("tree");
    std::fs::create_dir(&tree)?;
    let mut bytes = vec![0x5a; READ];
    for (number, page) in (0u64..).zip(bytes.chunks_mut(4096)) {
        if let Some(start) = page.first_chunk_mut() {
            *start = number.to_le_bytes();
        }
    }
    for name in ["read", "map"] {
        std::fs::write(tree.join(name), &bytes)?;
    }
    File::create(tree.join("rest"))?.set_len(REST)?;
    let image = dir.join("image");
    let made = Command::new("mkfs.erofs")
        .arg("--quiet")
        .args([&image, &tree])
        .status()
        .context("mkfs.erofs cannot be started")?;
    if !made.success() {
        bail!("mkfs.erofs failed: {made}");
    }
    std::fs::remove_dir_all(&tree)?;
    Ok(image)
}

/// A machine, and its guest's output.
struct Machine {
    child: Running,
    console: BufReader<ChildStdout>,
    messages: PathBuf,
}

impl Machine {
    fn start(files: &Files, way: Way, until: &str) -> Result<Self> {
        let messages = files.dir.join("stderr");
        let mut child = Running(
            Command::new(&files.podvisor)
                .arg(way.name)
                .args([&files.kernel, &files.initramfs])
                .arg(format!("{MEMORY}MiB"))
                .arg(format!(
                    "console=ttyS0 quiet panic=-1 reboot=k noreplace-smp image={}{until}",
                    way.device
                ))
                .arg(&files.image)
                .stdin(Stdio::null())
                .stdout(Stdio::piped())
                .stderr(File::create(&messages)?)
                .spawn()
                .context("podvisor cannot be started")?,
        );
        let console = child.0.stdout.take().context("stdout was not kept")?;
        Ok(Self {
            child,
            console: BufReader::new(console),
            messages,
        })
    }

    /// Waits for the guest's line of `step`, and returns the rest of the line.
    fn wait_for(&mut self, step: &str) -> Result<String> {
        let mut seen = String::new();
        loop {
            let mut line = String::new();
            if self.console.read_line(&mut line)? == 0 {
                let messages = std::fs::read_to_string(&self.messages).unwrap_or_default();
                bail!(
                    "it ended before {step:?}: {} {}",
                    seen.trim(),
                    messages.trim()
                );
            }
            if let Some(rest) = line.trim().strip_prefix(step) {
                return Ok(rest.trim().to_owned());
            }
            seen.push_str(&line);
        }
    }
}

/// Measures the cost of each step of one guest.
fn steps(files: &Files, way: Way) -> Result<Row> {
    let began = Instant::now();
    let mut machine = Machine::start(files, way, "")?;
    let mut costs = Vec::new();
    let mut before = 0;
    let mut free = 0.0;
    for step in STEPS {
        let rest = machine.wait_for(step)?;
        let sample = take(
            machine.child.0.id(),
            Kind::Podvisor,
            MEMORY,
            began.elapsed(),
        )?;
        let now = sample.own() + sample.vcpus();
        costs.push((now - before) as f64 / 1e6);
        before = now;
        if step == "up" {
            free = rest.parse::<f64>().context("the guest's free memory")? / 1024.0;
        }
    }
    Ok(Row {
        name: way.name,
        steps: costs,
        free,
    })
}

/// Measures the memory of `count` machines that have read the file.
fn memory(files: &Files, way: Way, count: u32) -> Result<Memory> {
    // Programs and the image are in the host's page cache after one machine has run.
    Machine::start(files, way, " until=read")?.wait_for(ALL_READ)?;
    let before = HostMemory::now()?;
    let mut machines = Vec::new();
    for _ in 0..count {
        let mut machine = Machine::start(files, way, " until=read")?;
        machine.wait_for(ALL_READ)?;
        machines.push(machine);
    }
    let after = HostMemory::now()?;
    let mut private = 0;
    for machine in &machines {
        private += Private::of(machine.child.0.id())?.kib;
    }
    let of_one = |kib: u64| kib as f64 / f64::from(count) / 1024.0;
    Ok(Memory {
        name: way.name,
        machines: count,
        private: of_one(private),
        host: of_one(before.available.saturating_sub(after.available)),
        tables: of_one(after.tables.saturating_sub(before.tables)),
    })
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(memory) = &self.memory {
            writeln!(
                f,
                "{} machines that have read {} MiB of one image, MiB of each",
                memory.machines,
                READ >> 20
            )?;
            writeln!(f, "{:8} {:>9} {:>9} {:>9}", "", "private", "host", "tables")?;
            return writeln!(
                f,
                "{:8} {:9.2} {:9.2} {:9.2}",
                memory.name, memory.private, memory.host, memory.tables
            );
        }
        writeln!(
            f,
            "An image of {} MiB, of which {} MiB are read by calls and as many by a mapping, twice: \
             {} of each step, the guest's free memory in MiB",
            (2 * READ as u64 + REST) >> 20,
            READ >> 20,
            self.unit
        )?;
        write!(f, "{:8}", "")?;
        for step in STEPS {
            write!(f, " {step:>9}")?;
        }
        writeln!(f, " {:>9}", "free")?;
        for row in &self.steps {
            write!(f, "{:8}", row.name)?;
            for step in &row.steps {
                write!(f, " {step:9.2}")?;
            }
            writeln!(f, " {:9.2}", row.free)?;
        }
        Ok(())
    }
}
