//! CPUs that were plugged into a machine that moves.

use super::*;

/// One whose machine may get another CPU.
fn growing(boot: BootMachine) -> BootMachine {
    BootMachine {
        max_vcpus: MAX_VCPUS,
        ..boot
    }
}

#[tokio::test]
async fn a_machine_keeps_its_cpus_when_it_moves_and_gets_none_meanwhile() {
    let mut source = Side::new(|pod| growing(machine(pod))).await;
    says(&source.pod, ID, 1).await;
    let refused = async |side: &Side, count| {
        let error = side.sandbox.set_vcpus(count).await.unwrap_err();
        (error.kind(), error.to_string())
    };
    // Nobody answers: the migration is open until the connection ends.
    let (one, nobody) = UnixStream::pair().unwrap();
    source.send(one).await;
    let (kind, said) = refused(&source, 2).await;
    assert_eq!(kind, Some(RefusalKind::WrongState), "{said}");
    let plug = source.sandbox.grow(64 << 20, 0, 0, Duration::ZERO).await;
    let plug = plug.unwrap_err();
    assert_eq!(plug.kind(), Some(RefusalKind::WrongState), "{plug}");
    drop(nobody);
    source.until(MigrationState::Failed).await;
    source.sandbox.set_vcpus(2).await.unwrap();
    source.counts('A').await;

    // A machine that may not have as many is not given any.
    let target = Side::waiting(LONG).await;
    let (one, other) = UnixStream::pair().unwrap();
    target.receive(other).await;
    source.send(one).await;
    let failed = source.until(MigrationState::Failed).await;
    assert!(failed.reason.contains("2 vCPUs"), "{failed:?}");
    source.counts('B').await;
    drop(target);

    let mut target = Side::new(|pod| growing(incoming(pod, LONG))).await;
    let (kind, said) = refused(&target, 2).await;
    assert_eq!(kind, Some(RefusalKind::WrongState), "{said}");
    let (one, other) = UnixStream::pair().unwrap();
    target.receive(other).await;
    source.send(one).await;
    assert_eq!(source.ended().await, (0, None));
    target.until(MigrationState::Done).await;
    target.counts('C').await;
    let (kind, said) = refused(&target, 1).await;
    assert_eq!(kind, Some(RefusalKind::WrongState));
    assert!(said.contains("has 2 CPUs"), "{said}");
    target.powers_off().await;
    source.sandbox.shutdown(Duration::ZERO).await.unwrap();
}
