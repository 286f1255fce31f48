//! The control queue (§5.1.6.5): a class, a command and its data in, one byte of
//! acknowledgement out.

use super::feature;
use super::filter::{MAX_MULTICAST, MAX_UNICAST, Table};
use super::mac::MacAddress;
use crate::GuestRam;
use crate::virtio::{Chain, Fault};

const CLASS_RX: u8 = 0;
const CLASS_MAC: u8 = 1;
const CLASS_MQ: u8 = 4;
const CLASS_GUEST_OFFLOADS: u8 = 5;

const RX_PROMISC: u8 = 0;
/// The last mode without `CTRL_RX_EXTRA`, which is not offered.
const RX_ALLMULTI: u8 = 1;
const MAC_TABLE_SET: u8 = 0;
const MAC_ADDR_SET: u8 = 1;
const MQ_PAIRS_SET: u8 = 0;
const GUEST_OFFLOADS_SET: u8 = 0;

const ACK_OK: u8 = 0;
const ACK_ERR: u8 = 1;

/// A command of the driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Command {
    /// Switches on or off that the driver gets all frames.
    SetPromiscuous(bool),
    /// Switches on or off that the driver gets all multicast frames.
    SetAllMulticast(bool),
    /// Sets the unicast and the multicast addresses whose frames the driver gets.
    SetTables(Table, Table),
    /// Sets the driver's address.
    SetMac(MacAddress),
    /// Sets how many queue pairs the driver uses from now on.
    SetPairs(u16),
    /// Sets the work that received frames may leave to the driver, as feature bits.
    SetOffloads(u64),
    /// An unknown command, or data of the wrong length.
    Unknown,
}

impl Command {
    /// Parses the command, reading it once. One whose feature is not in `features` is unknown.
    pub(super) fn parse(chain: &Chain, mem: &GuestRam, features: u64) -> Result<Self, Fault> {
        if chain.writable_len() == 0 {
            return Err(Fault::protocol(
                "a network control command without room for its acknowledgement",
            ));
        }
        let mut head = [0; 2];
        if chain.readable_len() < head.len() {
            return Ok(Self::Unknown);
        }
        chain.read(mem, 0, &mut head)?;
        let needed = match head {
            [CLASS_RX, _] | [CLASS_MAC, MAC_TABLE_SET] => feature::CTRL_RX,
            [CLASS_MAC, _] => feature::CTRL_MAC_ADDR,
            [CLASS_MQ, _] => feature::MQ,
            [CLASS_GUEST_OFFLOADS, _] => feature::CTRL_GUEST_OFFLOADS,
            _ => return Ok(Self::Unknown),
        };
        if features & needed == 0 {
            return Ok(Self::Unknown);
        }
        let data = chain.readable_len().saturating_sub(head.len());
        Ok(match head {
            [CLASS_RX, mode @ (RX_PROMISC | RX_ALLMULTI)] if data == 1 => {
                let mut on = [0];
                chain.read(mem, 2, &mut on)?;
                match mode {
                    RX_PROMISC => Self::SetPromiscuous(on != [0]),
                    _ => Self::SetAllMulticast(on != [0]),
                }
            }
            [CLASS_MAC, MAC_TABLE_SET] => match tables(chain, mem, data)? {
                Some((unicast, multicast)) => Self::SetTables(unicast, multicast),
                None => Self::Unknown,
            },
            [CLASS_MAC, MAC_ADDR_SET] if data == 6 => {
                let mut mac = [0; 6];
                chain.read(mem, 2, &mut mac)?;
                Self::SetMac(MacAddress(mac))
            }
            [CLASS_MQ, MQ_PAIRS_SET] if data == 2 => {
                let mut pairs = [0; 2];
                chain.read(mem, 2, &mut pairs)?;
                Self::SetPairs(u16::from_le_bytes(pairs))
            }
            [CLASS_GUEST_OFFLOADS, GUEST_OFFLOADS_SET] if data == 8 => {
                let mut bits = [0; 8];
                chain.read(mem, 2, &mut bits)?;
                Self::SetOffloads(u64::from_le_bytes(bits))
            }
            _ => Self::Unknown,
        })
    }
}

/// Reads the unicast and the multicast table; `None` if the data is not exactly two tables.
fn tables(chain: &Chain, mem: &GuestRam, data: usize) -> Result<Option<(Table, Table)>, Fault> {
    // After the class and the command.
    let mut at = 2usize;
    let end = at.saturating_add(data);
    let mut table = |max: usize| -> Result<Option<Table>, Fault> {
        if end.saturating_sub(at) < 4 {
            return Ok(None);
        }
        let mut entries = [0; 4];
        chain.read(mem, at, &mut entries)?;
        let len = (u32::from_le_bytes(entries) as usize).saturating_mul(6);
        let start = at.saturating_add(4);
        at = start.saturating_add(len);
        if at > end {
            return Ok(None);
        }
        let mut addresses = [0; (MAX_MULTICAST + 1) * 6];
        // One more tells that they are too many.
        let kept = max.saturating_add(1).saturating_mul(6).min(len);
        let addresses = addresses.get_mut(..kept).unwrap_or(&mut []);
        chain.read(mem, start, addresses)?;
        Ok(Some(Table::new(addresses, max)))
    };
    let tables = table(MAX_UNICAST)?.zip(table(MAX_MULTICAST)?);
    Ok(tables.filter(|_| at == end))
}

/// Writes the acknowledgement; returns the number of bytes written.
pub(super) fn acknowledge(chain: &Chain, mem: &GuestRam, done: bool) -> Result<u32, Fault> {
    chain.write(mem, 0, &[if done { ACK_OK } else { ACK_ERR }])?;
    Ok(1)
}
