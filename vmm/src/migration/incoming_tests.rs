use proptest::prelude::*;

use super::*;
use crate::migration::testing::{fuzz_stream, machine, receive, stream};
use crate::snapshot::encode_moving;
use crate::snapshot::testing::sample;
use crate::transport::Transport;

fn state(machine: &MachineState) -> (MessageKind, u64, Vec<u8>) {
    (MessageKind::State, 1, encode_moving(machine))
}

fn zeroes(address: u64, len: u64) -> (MessageKind, u64, Vec<u8>) {
    (MessageKind::Zeroes, address, len.to_le_bytes().to_vec())
}

#[test]
fn pages_and_zeroes_arrive_where_they_belong() {
    let bytes = stream(&[
        (MessageKind::Pages, 0x3000, vec![7; 0x3000]),
        (MessageKind::Round, 0, Vec::new()),
        zeroes(0x4000, 0x1000),
        zeroes(0, 32 << 20),
        (MessageKind::Pages, 0x1ff_f000, vec![9; 0x1000]),
        state(&machine()),
    ]);
    let (arrived, memory, paused_at) = receive(&bytes).unwrap();
    assert_eq!(paused_at, 1);
    assert_eq!(arrived.devices.len(), machine().devices.len());
    let read = |at| memory.ram().read_obj::<u8>(GuestAddress(at)).unwrap();
    assert_eq!([read(0x3000), read(0x4000), read(0x1ff_ffff)], [0, 0, 9]);
}

#[test]
fn pages_that_are_none_are_refused() {
    for (address, len) in [
        (0x10, 0x1000u64),
        (0x1000, 0x10),
        (0x1000, 0),
        (0x200_0000, 0x1000),
        (0x1ff_f000, 0x2000),
        (u64::MAX - 0xfff, 0x1000),
        (0x1000, u64::MAX - 0xfff),
    ] {
        let error = receive(&stream(&[zeroes(address, len)])).unwrap_err();
        assert!(
            matches!(error, ReceiveError::NoPages { .. }),
            "{address:#x}"
        );
        if let Ok(len) = usize::try_from(len)
            && len <= 0x2000
        {
            let pages = (MessageKind::Pages, address, vec![1; len]);
            let error = receive(&stream(&[pages])).unwrap_err();
            assert!(matches!(error, ReceiveError::NoPages { .. }));
        }
    }
}

#[test]
fn a_paused_machine_that_is_another_one_is_refused() {
    let refused = |change: fn(&mut MachineState)| {
        let mut other = machine();
        change(&mut other);
        receive(&stream(&[state(&other)])).unwrap_err().to_string()
    };
    let memory = refused(|state| state.memory = MemoryShape::fixed(MemorySize::mib(33)));
    assert!(memory.contains("other memory"), "{memory}");
    let devices = refused(|state| drop(state.devices.pop()));
    assert!(devices.contains("other devices"), "{devices}");
    let processor = refused(|state| state.cpuid.as_mut_slice()[0].eax = 1);
    assert!(processor.contains("processor"), "{processor}");
    let difference = MachineState {
        base: sample(Transport::Pci).base,
        ..machine()
    };
    let error = receive(&stream(&[state(&difference)])).unwrap_err();
    assert!(matches!(error, ReceiveError::State(_)), "{error}");
}

#[test]
fn clocks_go_on_by_the_time_that_passed_and_by_none_that_is_not_believed() {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    let ago = |seconds| (now - Duration::from_secs(seconds)).as_nanos() as u64;
    assert!((10..=60).contains(&since(ago(10)).as_secs()));
    let later = (now + Duration::from_secs(100)).as_nanos() as u64;
    for nanos in [ago(1000), later, 0, u64::MAX] {
        assert_eq!(since(nanos), Duration::ZERO);
    }
}

proptest! {
    #[test]
    fn any_messages_are_refused_or_bring_a_machine(
        data in prop::collection::vec(any::<u8>(), 0..64),
    ) {
        fuzz_stream(&data);
    }

    #[test]
    fn a_damaged_stream_is_an_error_or_a_machine(
        at in 0usize..20_000,
        byte in any::<u8>(),
        len in 0usize..30_000,
    ) {
        let mut bytes = stream(&[
            (MessageKind::Pages, 0x3000, vec![7; 0x1000]),
            (MessageKind::Round, 0, Vec::new()),
            state(&machine()),
        ]);
        let at = at % bytes.len();
        bytes[at] = byte;
        bytes.truncate(len);
        // Whichever: it returns.
        drop(receive(&bytes));
    }
}
