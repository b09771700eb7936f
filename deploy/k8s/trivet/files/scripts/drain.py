"""Runs before a pod gets SIGTERM, so that its going costs no work.

A rollout takes no more prompts and finishes its groups. A trainer pod that is not rank 0's asks rank 0 for a checkpoint
and to pause: its ranks are missed until it is back, and what would be trained meanwhile would be lost.
"""

import argparse
import os
import sys
import time
from pathlib import Path

import grpc
from trivet.v1 import rollout_pb2, rollout_pb2_grpc, trainer_pb2, trainer_pb2_grpc

CALL_SECONDS = 10.0
LOOK_SECONDS = 1.0


def main(argv: list[str] | None = None) -> int:
    """0 in every case that leaves nothing to wait for, a missing service included; 1 when the time is up."""
    parser = argparse.ArgumentParser()
    parser.add_argument("service", choices=["rollout", "trainer"])
    parser.add_argument("--address", default="127.0.0.1:50051")
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--token-file", type=Path, default=Path("/etc/trivet/secrets/token"))
    arguments = parser.parse_args(argv)
    if arguments.service == "trainer" and os.environ.get("JOB_COMPLETION_INDEX", "0") == "0":
        # Rank 0 saves on SIGTERM by itself.
        return 0
    token = arguments.token_file.read_text(encoding="utf-8").strip()
    metadata = (("authorization", f"Bearer {token}"),)
    with grpc.insecure_channel(arguments.address) as channel:
        try:
            if arguments.service == "rollout":
                return drain_rollout(channel, metadata, arguments.seconds)
            save(channel, metadata, arguments.seconds)
        except grpc.RpcError as error:
            sys.stderr.write(f"{arguments.address}: {error.code().name}: {error.details()}\n")
            return 1 if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED else 0
    return 0


def drain_rollout(channel: grpc.Channel, metadata: tuple[tuple[str, str], ...], seconds: float) -> int:
    service = rollout_pb2_grpc.RolloutServiceStub(channel)
    deadline = time.monotonic() + seconds
    service.Pause(rollout_pb2.RolloutServicePauseRequest(), metadata=metadata, timeout=CALL_SECONDS)
    # A read under way as the pause came may still bring prompts.
    quiet = 0
    while quiet < 2:
        status = service.GetStatus(
            rollout_pb2.RolloutServiceGetStatusRequest(), metadata=metadata, timeout=CALL_SECONDS
        )
        quiet = quiet + 1 if status.running_groups == 0 else 0
        if time.monotonic() > deadline:
            sys.stderr.write(f"{status.running_groups} groups are left for another rollout\n")
            return 1
        time.sleep(LOOK_SECONDS)
    return 0


def save(channel: grpc.Channel, metadata: tuple[tuple[str, str], ...], seconds: float) -> None:
    service = trainer_pb2_grpc.TrainerServiceStub(channel)
    service.SaveCheckpoint(trainer_pb2.SaveCheckpointRequest(), metadata=metadata, timeout=seconds)
    service.Pause(trainer_pb2.TrainerServicePauseRequest(), metadata=metadata, timeout=CALL_SECONDS)


if __name__ == "__main__":
    sys.exit(main())
