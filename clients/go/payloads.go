package penstock

import (
	"bytes"
	"crypto/aes"
	"crypto/cipher"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"strings"
)

const (
	sealedMark = "penstock+"
	plainMark  = "penstock+plain:"
	objectMark = "penstock+object:"
	headBytes  = 32 // "PSK1" or "PSK2", and the salt
)

var sealedForm = regexp.MustCompile(`^penstock\+sealed:([0-9a-f]{16}):([A-Za-z0-9+/=]*)$`)

// payloadKeys are payload keys by id.
type payloadKeys map[string][]byte

// newPayloadKeys reads keys in base64. Its errors do not have them.
func newPayloadKeys(texts []string) (payloadKeys, error) {
	keys := payloadKeys{}
	for position, text := range texts {
		key, err := base64.StdEncoding.DecodeString(text)
		if err != nil || len(key) != 32 {
			return nil, fmt.Errorf("payload key %d is not 32 bytes in base64; `penstock payload-key` creates one", position+1)
		}
		keys[hexDigest(append([]byte("penstock payload key\x00"), key...))[:16]] = key
	}
	return keys, nil
}

// sealedBytes is how many bytes a text has once the pipeline has encrypted it, if it does.
func (keys payloadKeys) sealedBytes(bytes int) int {
	if len(keys) == 0 {
		return bytes
	}
	return (bytes+headBytes+18)/3*4 + 40
}

// owner is what a value was encrypted with. older: without the tenant.
type owner struct{ text, older string }

func payloadOwner(action, tenant string) owner {
	older := "payload\x00" + action
	if tenant == "" {
		return owner{older, older}
	}
	return owner{"payload\x00" + tenant + "\x00" + action, older}
}

func stepOwner(taskID, name string, repetition int) owner {
	text := fmt.Sprintf("step\x00%s\x00%s\x00%d", taskID, name, repetition)
	return owner{text, text}
}

func unavailable(format string, args ...any) error {
	message := "the payload is unavailable: " + fmt.Sprintf(format, args...)
	return &failure{kind: "PayloadUnavailable", message: message, data: map[string]any{"not_begun": true}}
}

func lost(why string) error {
	return &failure{kind: "PayloadLost", message: "the payload cannot be read: " + why}
}

// open returns a value as its handler sees it.
func (keys payloadKeys) open(value json.RawMessage, owner owner) (json.RawMessage, error) {
	if !bytes.HasPrefix(value, []byte(`"`+sealedMark)) {
		return value, nil
	}
	var text string
	if err := json.Unmarshal(value, &text); err != nil {
		return nil, err
	}
	if strings.HasPrefix(text, plainMark) {
		return json.Marshal(text[len(plainMark):])
	}
	if strings.HasPrefix(text, objectMark) {
		return nil, unavailable("it is stored as an object in a bucket, which this worker does not read")
	}
	match := sealedForm.FindStringSubmatch(text)
	if match == nil {
		return nil, unavailable("it is sealed in a form that this worker does not know")
	}
	key, ok := keys[match[1]]
	if !ok {
		return nil, unavailable("it is encrypted with key %s: add that key to PENSTOCK_PAYLOAD_KEYS", match[1])
	}
	data, err := base64.StdEncoding.DecodeString(match[2])
	if err == nil {
		data, err = decrypt(key, data, owner)
	}
	if err != nil || !json.Valid(data) {
		return nil, lost("what is encrypted with key " + match[1] + " was changed, or belongs to something else")
	}
	return data, nil
}

func decrypt(key, data []byte, owner owner) ([]byte, error) {
	if len(data) < headBytes {
		return nil, errors.New("it is too short")
	}
	salt, aad := data[4:headBytes], owner.older
	switch string(data[:4]) {
	case "PSK1":
	case "PSK2":
		salt, aad = data[:headBytes], owner.text
	default:
		return nil, errors.New("it has an unknown form")
	}
	block, err := aes.NewCipher(hmacSHA256(key, salt))
	if err != nil {
		return nil, err
	}
	gcm, err := cipher.NewGCM(block)
	if err != nil {
		return nil, err
	}
	return gcm.Open(nil, make([]byte, gcm.NonceSize()), data[headBytes:], []byte(aad))
}
