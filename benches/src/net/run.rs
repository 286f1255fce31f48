//! Runs one guest, and measures its network.

use std::io::{BufRead, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use super::Size;
use crate::monitor::Subject;

/// The address and port of the guest (`benches/guest/net.c`).
const GUEST: ([u8; 4], u16) = ([10, 9, 0, 2], 5001);

/// The time limit for the guest's answers.
const PATIENCE: Duration = Duration::from_secs(120);

/// The size of the warm-up.
const WARM: Size = Size {
    bytes: 4 << 20,
    round_trips: 200,
};

/// CPU of the monitor's threads in ns, and the elapsed time.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cost {
    pub(super) own: u64,
    pub(super) vcpu: u64,
    pub(super) time: Duration,
}

/// The results of one run.
#[derive(Clone, Copy, Debug)]
pub(super) struct Costs {
    pub(super) to_guest: Cost,
    pub(super) from_guest: Cost,
    pub(super) round_trips: Cost,
}

/// Runs a guest and talks to it.
pub(super) fn run(subject: &Subject, size: Size, dir: &Path) -> Result<Costs> {
    let mut monitor = subject.start(dir)?;
    let mut seen = String::new();
    while !seen.ends_with("ready\r\n") && !seen.ends_with("ready\n") {
        if monitor.console.read_line(&mut seen)? == 0 {
            bail!("it ended: {} {}", seen.trim(), monitor.messages());
        }
    }
    let measured = |work: fn(Size) -> Result<()>| -> Result<Cost> {
        work(WARM)?;
        let before = monitor.sample()?;
        let start = Instant::now();
        work(size)?;
        let time = start.elapsed();
        let after = monitor.sample()?;
        Ok(Cost {
            own: after.own() - before.own(),
            vcpu: after.vcpus() - before.vcpus(),
            time,
        })
    };
    Ok(Costs {
        to_guest: measured(to_guest)?,
        from_guest: measured(from_guest)?,
        round_trips: measured(round_trips)?,
    })
}

/// Opens a connection on which the guest does what `kind` selects.
fn connect(kind: u8) -> Result<TcpStream> {
    let address = SocketAddr::from(GUEST);
    let mut stream = TcpStream::connect_timeout(&address, PATIENCE)
        .context("the guest cannot be connected to")?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    stream.write_all(&[kind])?;
    Ok(stream)
}

fn to_guest(size: Size) -> Result<()> {
    let mut stream = connect(b's')?;
    let piece = vec![0x5a; 256 << 10];
    let mut left = size.bytes;
    while left > 0 {
        let len = left.min(piece.len());
        stream.write_all(&piece[..len])?;
        left -= len;
    }
    stream.shutdown(Shutdown::Write)?;
    stream
        .read_exact(&mut [0])
        .context("the guest did not read all")
}

fn from_guest(size: Size) -> Result<()> {
    let mut stream = connect(b'g')?;
    stream.write_all(&(size.bytes as u64).to_le_bytes())?;
    let mut buffer = vec![0; 256 << 10];
    let mut got = 0;
    loop {
        match stream.read(&mut buffer)? {
            0 => break,
            len => got += len,
        }
    }
    ensure!(got == size.bytes, "{got} bytes of {} came", size.bytes);
    Ok(())
}

fn round_trips(size: Size) -> Result<()> {
    let mut stream = connect(b'e')?;
    for _ in 0..size.round_trips {
        stream.write_all(&[1])?;
        stream
            .read_exact(&mut [0])
            .context("the guest did not answer")?;
    }
    Ok(())
}
