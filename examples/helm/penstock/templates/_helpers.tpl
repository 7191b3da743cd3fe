{{- define "penstock.labels" -}}
app.kubernetes.io/name: penstock
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "penstock.image" -}}
{{- $image := .image | default dict -}}
{{- $tag := $image.tag | default .root.Values.image.tag | default .root.Chart.AppVersion -}}
{{ $image.repository | default .root.Values.image.repository }}:{{ $tag }}
{{- end }}

{{/* A value of the environment. Numbers of values are floats, of which large ones would be written as 3.3554432e+07. */}}
{{- define "penstock.text" -}}
{{- if not (kindIs "float64" .) }}{{ . }}{{ else if eq . (int64 . | float64) }}{{ int64 . }}{{ else }}{{ . }}{{ end }}
{{- end }}

{{/* The name of workers' objects and their service in metrics. */}}
{{- define "penstock.workers" -}}
{{ eq . "default" | ternary "worker" (printf "worker-%s" .) }}
{{- end }}

{{/* A ServiceAccount with the IAM role of one process. Needs root, component and roleArn. */}}
{{- define "penstock.serviceAccount" -}}
apiVersion: v1
kind: ServiceAccount
metadata:
  name: {{ .root.Release.Name }}-{{ .component }}
  namespace: {{ .root.Release.Namespace }}
  labels:
    {{- include "penstock.labels" . | nindent 4 }}
  {{- with .roleArn }}
  annotations:
    eks.amazonaws.com/role-arn: {{ . | quote }}
  {{- end }}
automountServiceAccountToken: false
{{- end }}

{{/* Needs root, component and maxUnavailable. */}}
{{- define "penstock.disruptionBudget" -}}
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: {{ .root.Release.Name }}-{{ .component }}
  namespace: {{ .root.Release.Namespace }}
  labels:
    {{- include "penstock.labels" . | nindent 4 }}
spec:
  maxUnavailable: {{ .maxUnavailable }}
  selector:
    matchLabels:
      {{- include "penstock.labels" . | nindent 6 }}
{{- end }}

{{/*
A Deployment of one process. Needs root, component, image, args, replicas (nil where an autoscaler sets them), graceSeconds,
isApi, hasDatabase, env, extraEnv (text) and resources.
*/}}
{{- define "penstock.deployment" -}}
apiVersion: apps/v1
kind: Deployment
metadata:
  name: {{ .root.Release.Name }}-{{ .component }}
  namespace: {{ .root.Release.Namespace }}
  labels:
    {{- include "penstock.labels" . | nindent 4 }}
spec:
  {{- if not (kindIs "invalid" .replicas) }}
  replicas: {{ .replicas }}
  {{- end }}
  selector:
    matchLabels:
      {{- include "penstock.labels" . | nindent 6 }}
  template:
    metadata:
      labels:
        {{- include "penstock.labels" . | nindent 8 }}
        {{- with .root.Values.podLabels }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      annotations:
        # The processes read their settings at start.
        checksum/settings: {{ .root.Values.settings | toJson | sha256sum }}
    spec:
      serviceAccountName: {{ .root.Release.Name }}-{{ .component }}
      automountServiceAccountToken: false
      # A Service named penstock-clockwork would set PENSTOCK_CLOCKWORK_PORT in every pod.
      enableServiceLinks: false
      # PID 1 of a container ignores signals that it does not handle. With another process as PID 1, SIGTERM works while
      # Python is still importing.
      shareProcessNamespace: true
      # More than PENSTOCK_GRACE_SECONDS and the preStop pause together.
      terminationGracePeriodSeconds: {{ add .graceSeconds 15 }}
      {{- include "penstock.placement" .root.Values | nindent 6 }}
      # If a zone fails, the other instances remain.
      topologySpreadConstraints:
        - maxSkew: 1
          topologyKey: topology.kubernetes.io/zone
          whenUnsatisfiable: ScheduleAnyway
          labelSelector:
            matchLabels:
              {{- include "penstock.labels" . | nindent 14 }}
      {{- include "penstock.podSecurity" . | nindent 6 }}
      containers:
        - name: {{ .component }}
          image: {{ include "penstock.image" . | quote }}
          imagePullPolicy: {{ .root.Values.image.pullPolicy }}
          args: {{ toJson .args }}
          envFrom:
            - configMapRef: { name: {{ .root.Release.Name }}-settings }
            {{- if .hasDatabase }}
            - secretRef: { name: {{ .root.Values.database.secret }} }
            {{- end }}
          env:
            - { name: PENSTOCK_METRICS_HOST, value: 0.0.0.0 }
            - { name: PENSTOCK_METRICS_PORT, value: "9464" }
            - { name: PENSTOCK_LOG_FORMAT, value: json }
            - { name: PENSTOCK_GRACE_SECONDS, value: {{ .graceSeconds | quote }} }
            {{- if .isApi }}
            - { name: PENSTOCK_HTTP_HOST, value: 0.0.0.0 }
            - { name: PENSTOCK_HTTP_PORT, value: "8080" }
            - { name: PENSTOCK_API_REQUIRE_KEYS, value: "true" }
            {{- end }}
            {{- with .extraEnv }}
            {{- . | nindent 12 }}
            {{- end }}
            {{- range $name, $value := .env }}
            - { name: {{ $name }}, value: {{ include "penstock.text" $value | quote }} }
            {{- end }}
          ports:
            - { name: metrics, containerPort: 9464 }
            {{- if .isApi }}
            - { name: http, containerPort: 8080 }
            {{- end }}
          # Alive while its event loop turns (it may block for 30 s); ready while its last pass succeeded. Not the other way
          # round: a restart does not repair the database.
          livenessProbe:
            httpGet: { path: /healthz, port: metrics }
            initialDelaySeconds: 15
            periodSeconds: 10
            timeoutSeconds: 5
            failureThreshold: 6
          {{- if not .hasDatabase }}
          # The import of your modules may take minutes.
          startupProbe:
            httpGet: { path: /healthz, port: metrics }
            periodSeconds: 5
            timeoutSeconds: 5
            failureThreshold: 60
          {{- end }}
          readinessProbe:
            httpGet: { path: /readyz, port: metrics }
            periodSeconds: 5
            timeoutSeconds: 5
            failureThreshold: 3
          {{- if .isApi }}
          # Load balancers learn of the stop a moment later than the process.
          lifecycle:
            preStop: { exec: { command: [sleep, "5"] } }
          {{- end }}
          resources:
            {{- toYaml .resources | nindent 12 }}
          {{- include "penstock.containerSecurity" . | nindent 10 }}
          volumeMounts:
            - { name: tmp, mountPath: /tmp }
      volumes:
        - name: tmp
          emptyDir: {}
{{- end }}

{{/* What all pods of the chart have of the values: where they run, and how their image is had. */}}
{{- define "penstock.placement" -}}
{{- range $name := list "imagePullSecrets" "nodeSelector" "tolerations" "priorityClassName" }}
{{- with index $ $name }}
{{ $name }}:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
{{- end }}

{{- define "penstock.podSecurity" -}}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  seccompProfile: { type: RuntimeDefault }
{{- end }}

{{- define "penstock.containerSecurity" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: { drop: [ALL] }
{{- end }}
