"""Rollouts as the trainer sees them: a gRPC service that does what a test tells it to."""

import threading
from concurrent import futures

import grpc
from trivet.v1 import rollout_pb2, rollout_pb2_grpc

STAGES = {
    "begin": rollout_pb2.TRANSFER_STAGE_READY,
    "part": rollout_pb2.TRANSFER_STAGE_LOADED,
    "finish": rollout_pb2.TRANSFER_STAGE_FINISHED,
}


class Rollout(rollout_pb2_grpc.RolloutServiceServicer):
    """`fails_at` names a call or step that is refused, `hangs_at` one that is never answered."""

    def __init__(self, name, token=None):
        self.name, self._token = name, token
        self.fails_at = self.hangs_at = None
        self.engine = "1"
        self.devices = [""]
        self.joins, self.steps, self.begun, self.got = [], [], [], []
        self.version = None
        self.abandoned = threading.Event()
        self._released = threading.Event()
        self._server = grpc.server(
            futures.ThreadPoolExecutor(4), options=[("grpc.max_receive_message_length", 64 * 2**20)]
        )
        rollout_pb2_grpc.add_RolloutServiceServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()

    @property
    def entry(self):
        return rollout_pb2.RegisteredRollout(
            rollout_id=self.name, address=f"127.0.0.1:{self.port}", engine=self.engine, devices=self.devices
        )

    def stop(self):
        self._released.set()
        self._server.stop(0).wait(5)

    def GetStatus(self, request, context):
        self._meet("status", context)
        return rollout_pb2.RolloutServiceGetStatusResponse(rollout_id=self.name, engine=self.engine)

    def JoinTransfer(self, request, context):
        self._meet("join", context)
        self.joins.append(request)
        self.joined(request)
        return rollout_pb2.JoinTransferResponse()

    def joined(self, request):
        """What the worker does in a group."""

    def part(self, request):
        """What the worker does with a part."""

    def UpdateWeights(self, request_iterator, context):
        context.add_callback(self.abandoned.set)
        for request in request_iterator:
            step = request.WhichOneof("step")
            self._meet(step, context)
            self.steps.append(step)
            if step == "begin":
                self.begun.append(request.begin)
                self.abandoned.clear()
            elif step == "part":
                self.part(request.part)
            else:
                self.version = self.begun[-1].weights.version
            yield rollout_pb2.UpdateWeightsResponse(stage=STAGES[step])

    def _meet(self, step, context):
        if self._token is not None:
            given = dict(context.invocation_metadata()).get("authorization")
            if given != f"Bearer {self._token}":
                context.abort(grpc.StatusCode.UNAUTHENTICATED, "no token")
        if step == self.fails_at:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"refuses {step}")
        if step == self.hangs_at:
            self._released.wait(30)
            context.abort(grpc.StatusCode.ABORTED, "the test is over")
