{{/* The trainer's Job below metadata. */}}
{{- define "trivet.trainerSpec" -}}
{{- $values := .Values.trainer }}
{{- $context := dict "root" . "component" "trainer" "values" $values }}
{{- $nodes := int $values.nodes }}
{{- $processes := int (include "trivet.trainerProcesses" .) }}
completionMode: Indexed
completions: {{ $nodes }}
parallelism: {{ $nodes }}
backoffLimitPerIndex: {{ $values.retries }}
# No rank can continue without the others.
maxFailedIndexes: 0
# A second trainer, while the first is still ending, would write to the same checkpoints.
podReplacementPolicy: Failed
podFailurePolicy:
  rules:
    # A drained or preempted node is nobody's fault.
    - action: Ignore
      onPodConditions:
        - type: DisruptionTarget
          status: "True"
    # services/common/exit_codes.py: the configuration cannot be used (2), or the run gave up (4). No restart helps.
    - action: FailJob
      onExitCodes:
        containerName: trainer
        operator: In
        values: [2, 4]
template:
  metadata:
    {{- include "trivet.podMetadata" $context | nindent 4 }}
  spec:
    {{- include "trivet.podSpec" $context | nindent 4 }}
    restartPolicy: Never
    subdomain: {{ include "trivet.trainerNodes" . }}
    terminationGracePeriodSeconds: {{ add $values.stopSeconds (ternary $values.stopSeconds 0 (gt $nodes 1)) 30 }}
    {{- with include "trivet.waitForPrepare" $context }}
    {{- . | nindent 4 }}
    {{- end }}
    containers:
      - name: trainer
        {{- include "trivet.container" $context | nindent 8 }}
        {{- if and (eq $nodes 1) (eq $processes 1) }}
        command: [python3, -m, services.trainer]
        args:
          {{- include "trivet.serviceArguments" $context | nindent 10 }}
        {{- else if eq $nodes 1 }}
        command: [python3, -m, services.trainer.launch]
        args:
          - --standalone
          - --nproc-per-node={{ $processes }}
          - --max-restarts={{ $values.workerRestarts }}
          - --shutdown-timeout={{ $values.stopSeconds }}
          - --module
          - services.trainer
          {{- include "trivet.serviceArguments" $context | nindent 10 }}
        {{- else }}
        # Pod 0 holds the rendezvous; it cannot tell so from its name before the name resolves. Ranks follow the order of
        # these addresses, so they are names: rank 0, which serves, is pod 0's, whatever IP it has.
        command:
          - /bin/sh
          - -ec
          - |
            if [ "$JOB_COMPLETION_INDEX" = 0 ]; then host=true; else host=false; fi
            exec python3 -m services.trainer.launch --rdzv-conf="is_host=$host,join_timeout={{ $values.startSeconds }},read_timeout=300" --local-addr="{{ include "trivet.trainerJob" . }}-$JOB_COMPLETION_INDEX.{{ include "trivet.trainerNodes" . }}" "$@"
          - trainer
        args:
          - --nnodes={{ $nodes }}
          - --nproc-per-node={{ $processes }}
          - --rdzv-backend=c10d
          - --rdzv-id={{ include "trivet.run" . }}
          - --rdzv-endpoint={{ include "trivet.trainerJob" . }}-0.{{ include "trivet.trainerNodes" . }}:29400
          - --max-restarts={{ $values.workerRestarts }}
          - --shutdown-timeout={{ $values.stopSeconds }}
          - --module
          - services.trainer
          {{- include "trivet.serviceArguments" $context | nindent 10 }}
        {{- end }}
        env:
          {{- if gt $nodes 1 }}
          # torchrun's agents would share their store with the ranks; a pod that takes the place of another would wait for it forever.
          - name: TORCH_DISABLE_SHARE_RDZV_TCP_STORE
            value: "1"
          {{- end }}
          {{- include "trivet.environment" $context | trim | nindent 10 }}
        {{- with $values.envFrom }}
        envFrom:
          {{- toYaml . | nindent 10 }}
        {{- end }}
        ports:
          - {name: grpc, protocol: TCP, containerPort: 50051}
          - {name: http, protocol: TCP, containerPort: 8080}
          - {name: rendezvous, protocol: TCP, containerPort: 29400}
        # Only rank 0 serves; the others have nothing to ask.
        startupProbe:
          exec:
            command: [python3, /etc/trivet/scripts/probe.py, readyz]
          periodSeconds: 10
          timeoutSeconds: 10
          failureThreshold: {{ div (add $values.startSeconds 9) 10 }}
        readinessProbe:
          exec:
            command: [python3, /etc/trivet/scripts/probe.py, readyz]
          periodSeconds: 10
          timeoutSeconds: 10
        livenessProbe:
          exec:
            command: [python3, /etc/trivet/scripts/probe.py, healthz]
          periodSeconds: 30
          timeoutSeconds: 20
          failureThreshold: 10
        {{- if gt $nodes 1 }}
        lifecycle:
          # A node that leaves takes its ranks along: rank 0 saves first.
          preStop:
            exec:
              command:
                - python3
                - /etc/trivet/scripts/drain.py
                - trainer
                - --address={{ include "trivet.trainerJob" . }}-0.{{ include "trivet.trainerNodes" . }}:50051
                - --seconds={{ $values.stopSeconds }}
        {{- end }}
        resources:
          {{- include "trivet.resources" (dict "root" . "resources" $values.resources "gpus" $values.gpusPerNode) | nindent 10 }}
        volumeMounts:
          {{- include "trivet.mounts" $context | nindent 10 }}
    volumes:
      {{- include "trivet.volumes" $context | nindent 6 }}
{{- end -}}
