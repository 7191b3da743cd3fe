package penstock

import (
	"bytes"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"time"
)

var (
	claimID         = regexp.MustCompile(`^([0-9]{1,19}):([0-9]{1,19})(?::[A-Za-z0-9]{1,64})?$`)
	traceparentForm = regexp.MustCompile(`^[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-([0-9a-f]{2})`)
	unsendable      = strings.NewReplacer("\ufffe", `\ufffe`, "\uffff", `\uffff`)
)

// request is a task as a message has it.
type request struct {
	ID      string          `json:"id"`
	Method  string          `json:"method"`
	Params  json.RawMessage `json:"params"`
	Journal []stepEntry     `json:"steps"`

	taskID      string
	claim       string
	tenant      string
	traceparent string
	tracestate  string
	limit       time.Duration
}

// requestsOf reads the tasks of a message; skipped is the number of entries that are none.
func requestsOf(message queueMessage) (found []request, skipped int, err error) {
	body := bytes.TrimSpace([]byte(message.Body))
	entries := []json.RawMessage{body}
	if bytes.HasPrefix(body, []byte("[")) {
		entries = nil
		err = json.Unmarshal(body, &entries)
	} else if !json.Valid(body) {
		err = errors.New("it is not JSON")
	}
	if err != nil {
		return nil, 0, err
	}
	tenants, err := tenantsOf(message.MessageAttributes)
	if err != nil {
		return nil, 0, err
	}
	traces := tracesOf(message.MessageAttributes)
	seconds, _ := strconv.ParseFloat(message.MessageAttributes["timeout_seconds"].StringValue, 64) // 0: no limit
	for _, entry := range entries {
		var one request
		err := json.Unmarshal(entry, &one)
		match := claimID.FindStringSubmatch(one.ID)
		if err != nil || one.Method == "" || match == nil {
			skipped++
			continue
		}
		if len(one.Params) == 0 {
			one.Params = json.RawMessage("{}")
		}
		one.taskID, one.claim = match[1], match[2]
		one.tenant = tenants(one.taskID)
		one.traceparent, one.tracestate = traces(one.taskID)
		one.limit = secondsOf(seconds)
		found = append(found, one)
	}
	if len(found) == 0 {
		return nil, skipped, errors.New("no entry is a request with a claim id")
	}
	return found, skipped, nil
}

// tenantsOf returns the tenant of each task; tasks without one have "".
func tenantsOf(attributes map[string]attribute) (func(taskID string) string, error) {
	if one, ok := attributes["tenant"]; ok {
		var tenant string
		if err := json.Unmarshal([]byte(one.StringValue), &tenant); err != nil {
			return nil, fmt.Errorf("the attribute tenant is not a JSON string: %w", err)
		}
		return func(string) string { return tenant }, nil
	}
	byTask := map[string]string{}
	if several, ok := attributes["tenants"]; ok {
		var ids map[string][]json.RawMessage
		if err := json.Unmarshal([]byte(several.StringValue), &ids); err != nil {
			return nil, fmt.Errorf("the attribute tenants is not lists of task ids by name: %w", err)
		}
		for tenant, tasks := range ids {
			for _, id := range tasks {
				byTask[strings.Trim(string(id), `"`)] = tenant
			}
		}
	}
	return func(taskID string) string { return byTask[taskID] }, nil
}

// tracesOf returns traceparent and tracestate of each task. Invalid ones are left out: a task runs without its trace.
func tracesOf(attributes map[string]attribute) func(taskID string) (string, string) {
	type trace struct {
		Traceparent string            `json:"traceparent"`
		Tracestate  string            `json:"tracestate"`
		Tasks       []json.RawMessage `json:"tasks"`
	}
	if shared, ok := attributes["traceparent"]; ok {
		state := attributes["tracestate"].StringValue
		return func(string) (string, string) { return shared.StringValue, state }
	}
	var several []trace
	byTask := map[string]trace{}
	if json.Unmarshal([]byte(attributes["traces"].StringValue), &several) == nil {
		for _, one := range several {
			for _, id := range one.Tasks {
				byTask[strings.Trim(string(id), `"`)] = one
			}
		}
	}
	return func(taskID string) (string, string) { return byTask[taskID].Traceparent, byTask[taskID].Tracestate }
}

// ownSpan returns a new span of a trace, "" without one.
func ownSpan(traceparent string) string {
	match := traceparentForm.FindStringSubmatch(traceparent)
	span := make([]byte, 8)
	if _, err := rand.Read(span); match == nil || err != nil {
		return ""
	}
	return "00-" + match[1] + "-" + hex.EncodeToString(span) + "-" + match[2]
}

func secondsOf(seconds float64) time.Duration {
	if seconds <= 0 || seconds > 1e9 {
		return 0
	}
	return time.Duration(seconds * float64(time.Second))
}

func notification(method string, params map[string]any) map[string]any {
	return map[string]any{"jsonrpc": "2.0", "method": method, "params": params}
}

// toText writes JSON without the two characters of JSON that SQS refuses.
func toText(value any) (string, error) {
	var text bytes.Buffer
	encoder := json.NewEncoder(&text)
	encoder.SetEscapeHTML(false)
	if err := encoder.Encode(value); err != nil {
		return "", err
	}
	return unsendable.Replace(strings.TrimSuffix(text.String(), "\n")), nil
}
